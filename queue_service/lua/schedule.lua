-- SCHEDULE: move jobs whose time has come from the scheduled registry to their queue.
-- KEYS 1 rq:scheduled:<q>  2 rq:queue:<q>  3 rq:queues
-- ARGV 1 iso time
-- Writes also rq:job:<id>.
-- Jobs under a rate limit are left: RQ's own code has to find them a slot. The worker that is
-- told of one has it to itself for a while.
-- Returns how many were queued, and the ids under a rate limit.
local scheduled, queue, queues = unpack(KEYS)
local n, limited = 0, {}
local now = redis_now()
local due = redis.call('ZRANGEBYSCORE', scheduled, '-inf', now, 'LIMIT', 0, 500)
for _, id in ipairs(due) do
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'rate_limit_key', 'enqueue_at_front')
  if f[1] ~= 'scheduled' then
    redis.call('ZREM', scheduled, id)
  elseif is_set(f[2]) then
    redis.call('ZADD', scheduled, 'XX', now + 30, id)
    limited[#limited + 1] = id
  else
    redis.call('ZREM', scheduled, id)
    redis.call('HSET', jk, 'status', 'queued', 'enqueued_at', ARGV[1])
    redis.call(f[3] == '1' and 'LPUSH' or 'RPUSH', queue, id)
    redis.call('SADD', queues, queue)
    n = n + 1
  end
end
return {n, limited}
