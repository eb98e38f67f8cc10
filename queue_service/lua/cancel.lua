-- CANCEL: cancel jobs that wait or run; what has ended stays as it is.
-- KEYS none
-- ARGV 1 iso time  2 seconds to keep the job  3 batch to end if nothing is left, or ''
--      4.. job ids
-- Writes rq:job:<id>, rq:canceled:<q>, rq:scheduled:<q>, rq:deferred:<q>, rq:ready:<q>, the
-- batch's keys; ends qsvc:stream:<id> if it is there; drops qsvc:progress:<id>:<ex>.
-- The ids stay in their queue's list: the claim drops what is not queued.
-- Returns how many were cancelled, then the names of the workers that run some of them.
local ENDED = {finished = true, failed = true, stopped = true, canceled = true}
local iso, keep = ARGV[1], tonumber(ARGV[2])
local now, n, workers, seen = math.floor(redis_now()), 0, {}, {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'worker_name', 'origin', 'qsvc_batch', 'qsvc_line')
  if f[1] and f[3] and not ENDED[f[1]] then
    n = n + 1
    redis.call('PERSIST', jk)  -- first, so that a full server takes a cancel
    redis.call('HSET', jk, 'status', 'canceled', 'ended_at', iso, 'qsvc_settled', 'cancelled')
    drop_progress(id, redis.call('HMGET', jk, 'qsvc_execution', 'qsvc_resume'))
    redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_resume')
    for _, registry in ipairs({':scheduled:', ':deferred:', ':ready:'}) do
      redis.call('ZREM', RQ .. registry .. f[3], id)
    end
    local is_line = is_set(f[4])
    if not is_line then redis.call('EXPIRE', jk, keep) end
    redis.call('ZADD', RQ .. ':canceled:' .. f[3], is_line and '+inf' or now + keep, id)
    if is_line then settle_line(batch_key(f[4]), f[5], 'cancelled') end
    local stream = 'qsvc:stream:' .. id
    if redis.call('EXISTS', stream) == 1 then
      redis.call('XADD', stream, '*', 'e', 'cancelled')
    end
    if f[1] == 'started' and is_set(f[2]) and not seen[f[2]] then
      seen[f[2]] = true
      workers[#workers + 1] = f[2]
    end
  end
end
if ARGV[3] ~= '' then close_batch(batch_key(ARGV[3])) end
return {n, workers}
