-- REQUEUE: a worker gives executions back in good order: front of the queue, nothing charged.
-- KEYS 1 rq:worker:<w>:executions  then per queue: rq:queue:<q>, rq:wip:<q>
-- ARGV per execution, in the order in which they were claimed: queue index from 0, job id,
--      execution id
-- Writes also rq:job:<id>, rq:execution:<id>:<ex>, rq:executions:<id>; the next claim goes on with
-- qsvc:progress:<id>:<ex>.
-- Returns how many went back.
local wex, n = KEYS[1], 0
for i = #ARGV - 2, 1, -3 do
  local q, id, ex = tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2]
  local queue, wip = KEYS[2 + 2 * q], KEYS[3 + 2 * q]
  local held = end_execution(wip, wex, id, ex)
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'qsvc_execution')
  if held == 1 and f[1] == 'started' and f[2] == ex then
    redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_alone')
    redis.call('HSET', jk, 'status', 'queued', 'started_at', '', 'worker_name', '')
    if redis.call('EXISTS', 'qsvc:progress:' .. id .. ':' .. ex) == 1 then
      redis.call('HSET', jk, 'qsvc_resume', ex)
    end
    redis.call('LPUSH', queue, id)
    n = n + 1
  end
end
return n
