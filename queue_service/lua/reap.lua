-- REAP: put jobs whose lease has ended back to the front of their queue.
-- KEYS 1 rq:wip:<q>  2 rq:queue:<q>
-- ARGV 1 '1' to take every lease, ended or not (only for the sole owner of a server)
-- Writes also rq:job:<id>, rq:execution:<id>:<ex>, rq:executions:<id>.
-- The job keeps the name of the execution it lost: the next claim charges the death.
-- Returns the ids that were put back.
local wip, queue = KEYS[1], KEYS[2]
local limit = ARGV[1] == '1' and '+inf' or math.floor(redis_now()) - 1
local back = {}
for _, composite in ipairs(redis.call('ZRANGEBYSCORE', wip, '-inf', limit, 'LIMIT', 0, 500)) do
  local id, ex = string.match(composite, '^(.*):(.*)$')
  end_execution(wip, nil, id, ex)
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'worker_name', 'qsvc_execution')
  -- Not one that another execution runs by now; stock workers name none.
  if f[1] == 'started' and (f[3] or ex) == ex then
    if is_set(f[2]) then
      redis.call('SREM', RQ .. ':worker:' .. f[2] .. ':executions', composite)
    end
    redis.call('HSET', jk, 'status', 'queued', 'started_at', '', 'worker_name', '')
    redis.call('LPUSH', queue, id)
    back[#back + 1] = id
  end
end
return back
