-- RELEASE: forget an execution that was taken from its worker; the job stays as it is. Stock RQ
-- tools cancel and delete without a word to who reads the job's text: its stream is ended here.
-- KEYS 1 rq:wip:<q>  2 rq:worker:<w>:executions
-- ARGV 1 job id  2 execution id
-- Drops rq:execution:<id>:<ex>, its place in rq:executions:<id>, qsvc:progress:<id>:<ex>; ends
-- qsvc:stream:<id> of a job that was cancelled or deleted.
redis.call('DEL', 'qsvc:progress:' .. ARGV[1] .. ':' .. ARGV[2])
local status, stream = redis.call('HGET', job_key(ARGV[1]), 'status'), 'qsvc:stream:' .. ARGV[1]
local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
if last and last[2][1] ~= 'e' and (not status or status == 'canceled') then
  redis.call('XADD', stream, '*', 'e', 'cancelled')
end
return end_execution(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
