-- FINISH: end one execution with its outcome: result, registries, counters, batch, stream end.
-- Accepted only while the execution holds its lease and the job is started, so once.
-- KEYS 1 rq:wip:<q>  2 rq:finished:<q> or rq:failed:<q>  3 rq:worker:<w>
--      4 rq:worker:<w>:executions
-- ARGV 1 job id  2 execution id  3 status (finished, failed, stopped)  4 iso time
--      5 seconds to keep (0 delete at once, -1 for ever)  6 worker name
--      7 execution start  8 execution end (epoch)  9 result type  10 result field
--      11 result payload  12 error (JSON) or ''  13 batch outcome
--      14 prompt tokens  15 completion tokens  16 cached tokens
--      17 the stream's last entry as a JSON array  18 seconds to keep the stream
--      19 '1' to end the stream even when it has no entry yet
-- Writes also rq:job:<id>, rq:results:<id>, the batch's keys, qsvc:stream:<id>;
-- drops qsvc:progress:<id>:<execution>.
-- Returns ok; lost (not our lease); or the status that refused the result (deleted, canceled…).
local wip, registry, wkey, wex = unpack(KEYS)
local id, ex, status, iso, keep = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local jk = job_key(id)
local held = redis.call('ZSCORE', wip, id .. ':' .. ex)
end_execution(wip, wex, id, ex)
redis.call('DEL', 'qsvc:progress:' .. id .. ':' .. ex)
if not held then
  -- Sent a second time because the first reply was lost: it was accepted then.
  local last = redis.call('XREVRANGE', RQ .. ':results:' .. id, '+', '-', 'COUNT', 1)[1]
  if last then
    for i = 1, #last[2], 2 do
      if last[2][i] == 'execution_id' and last[2][i + 1] == ex then return 'ok' end
    end
  end
  return 'lost'
end
local current = redis.call('HGET', jk, 'status')
if not current then return 'deleted' end
if current ~= 'started' then return current end

redis.call('HINCRBY', wkey, status == 'finished' and 'successful_job_count' or 'failed_job_count', 1)
redis.call('HINCRBYFLOAT', wkey, 'total_working_time', tonumber(ARGV[8]) - tonumber(ARGV[7]))
redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_deaths')
if redis.call('HDEL', jk, 'qsvc_auto_retry') == 1 then redis.call('HDEL', jk, 'retries_left') end
settle_line(id, ARGV[13], ARGV[14], ARGV[15], ARGV[16])
local stream = 'qsvc:stream:' .. id
if ARGV[19] == '1' or redis.call('EXISTS', stream) == 1 then
  redis.call('XADD', stream, '*', unpack(cjson.decode(ARGV[17])))
  redis.call('EXPIRE', stream, ARGV[18])
end
local results = RQ .. ':results:' .. id
if keep == 0 then
  redis.call('DEL', jk, results, RQ .. ':executions:' .. id)
  return 'ok'
end
redis.call('HSET', jk, 'status', status, 'ended_at', iso, 'last_heartbeat', iso)
local entry = {'type', ARGV[9], 'worker_name', ARGV[6], 'execution_id', ex,
  'execution_started_at', ARGV[7], 'execution_ended_at', ARGV[8], ARGV[10], ARGV[11]}
if ARGV[12] ~= '' then
  entry[#entry + 1] = 'qsvc_error'
  entry[#entry + 1] = ARGV[12]
end
redis.call('XADD', results, 'MAXLEN', '~', 10, '*', unpack(entry))
if keep > 0 then
  redis.call('EXPIRE', results, keep)
  redis.call('EXPIRE', jk, keep)
  redis.call('ZADD', registry, math.floor(redis_now()) + keep, id)
else
  redis.call('PERSIST', results)
  redis.call('ZADD', registry, '+inf', id)
end
return 'ok'
