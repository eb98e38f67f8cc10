-- SCHEDULE: move jobs whose time has come from the scheduled registry to their queue.
-- KEYS 1 rq:scheduled:<q>  2 rq:queue:<q>  3 rq:queues
-- ARGV 1 iso time
-- Writes also rq:job:<id>.
-- Jobs under a rate limit are left: RQ's own code has to find them a slot.
-- Returns how many were queued, and the ids under a rate limit.
local scheduled, queue, queues = unpack(KEYS)
local n, limited = 0, {}
local due = redis.call('ZRANGEBYSCORE', scheduled, '-inf', redis_now(), 'LIMIT', 0, 500)
for _, id in ipairs(due) do
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'rate_limit_key', 'enqueue_at_front')
  if is_set(f[2]) then
    limited[#limited + 1] = id
  else
    redis.call('ZREM', scheduled, id)
    if f[1] == 'scheduled' then
      redis.call('HSET', jk, 'status', 'queued', 'enqueued_at', ARGV[1])
      redis.call(f[3] == '1' and 'LPUSH' or 'RPUSH', queue, id)
      redis.call('SADD', queues, queue)
      n = n + 1
    end
  end
end
return {n, limited}
