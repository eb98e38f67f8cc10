-- RETRY: give failed, stopped or cancelled jobs a new generation, asked for by a person.
-- KEYS none
-- ARGV 1 iso time  2.. job ids
-- Writes rq:job:<id>, rq:queue:<origin>, rq:failed:<origin>, rq:canceled:<origin>, rq:queues,
-- rq:rl-keys, rq:rl:<limit>, rq:rl:<limit>:rate_limited, the batch's keys; drops
-- qsvc:stream:<id>, qsvc:progress:<id>:<ex>.
-- A batch that had ended is in progress again.
-- Returns the ids that were queued.
local queued, now = {}, redis_now()

-- A worker's maintenance lets RQ's own code queue it when its limit has room.
local function wait_for_slot(id, jk, limit, concurrency)
  local key = RQ .. ':rl:' .. limit
  redis.call('HSET', jk, 'status', 'rate_limited')
  redis.call('SADD', RQ .. ':rl-keys', limit)
  redis.call('HSET', key, 'concurrency', concurrency)
  redis.call('ZADD', key .. ':rate_limited', now, id)
end

for i = 2, #ARGV do
  local id = ARGV[i]
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'origin', 'qsvc_batch', 'qsvc_line',
    'qsvc_generation', 'rate_limit_key', 'rate_limit_concurrency')
  if f[2] and (f[1] == 'failed' or f[1] == 'stopped' or f[1] == 'canceled') then
    redis.call('ZREM', RQ .. ':failed:' .. f[2], id)
    redis.call('ZREM', RQ .. ':canceled:' .. f[2], id)
    redis.call('PERSIST', jk)
    drop_progress(id, redis.call('HMGET', jk, 'qsvc_execution', 'qsvc_resume'))
    redis.call('HDEL', jk, 'qsvc_settled', 'qsvc_deaths', 'qsvc_reached', 'qsvc_transient',
      'qsvc_execution', 'qsvc_resume', 'qsvc_alone')
    redis.call('HSET', jk, 'status', 'queued', 'enqueued_at', ARGV[1], 'started_at', '',
      'ended_at', '', 'worker_name', '', 'qsvc_generation', number(f[5], 0) + 1)
    redis.call('DEL', 'qsvc:stream:' .. id)
    if is_set(f[3]) and redis.call('EXISTS', batch_key(f[3])) == 1 then
      reopen_line(batch_key(f[3]), f[4])
      reopen_batch(batch_key(f[3]))  -- also one whose cancel has not come to its end
    end
    if is_set(f[6]) and is_set(f[7]) then
      wait_for_slot(id, jk, f[6], f[7])
    else
      redis.call('SADD', RQ .. ':queues', RQ .. ':queue:' .. f[2])
      redis.call('RPUSH', RQ .. ':queue:' .. f[2], id)
    end
    queued[#queued + 1] = id
  end
end
return queued
