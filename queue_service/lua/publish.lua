-- PUBLISH: text and progress of one execution, so that both say the same; refused when the
-- lease is gone or the job has ended (its stream too), and applied once however often it is sent.
-- KEYS 1 rq:wip:<q>  2 qsvc:stream:<id>  3 qsvc:progress:<id>:<ex>
-- ARGV 1 <id>:<ex>  2 number of this write, rising  3 seconds the keys live
--      4 '1' if an earlier execution's progress is not gone on with
--      5 number of progress elements  then those, then flat field lists of stream entries,
--      each preceded by its length
-- Writes also rq:job:<id>, which has the number of the last write: the execution's own hash may
-- have expired while the server hung, with the lease not yet reaped.
-- Returns 1 if the execution is ours, else 0.
local wip, stream, progress = unpack(KEYS)
if not redis.call('ZSCORE', wip, ARGV[1]) then return 0 end
local id, ex = string.match(ARGV[1], '^(.*):(.*)$')
local jk = job_key(id)
local f = redis.call('HMGET', jk, 'status', 'qsvc_execution', 'qsvc_write')
if f[1] ~= 'started' or f[2] ~= ex then return 0 end
local number = tonumber(ARGV[2])
if number <= (tonumber(f[3]) or 0) then return 1 end
redis.call('HSET', jk, 'qsvc_write', number)
if ARGV[4] == '1' then redis.call('DEL', progress) end
local at = 6 + tonumber(ARGV[5])
if at > 6 then
  redis.call('RPUSH', progress, unpack(ARGV, 6, at - 1))
  redis.call('EXPIRE', progress, ARGV[3])
end
if at <= #ARGV then
  while at <= #ARGV do
    local length = tonumber(ARGV[at])
    redis.call('XADD', stream, '*', unpack(ARGV, at + 1, at + length))
    at = at + 1 + length
  end
  redis.call('EXPIRE', stream, ARGV[3])
end
return 1
