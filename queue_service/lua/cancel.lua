-- CANCEL: cancel jobs that are queued or running; what has ended stays as it is.
-- KEYS none
-- ARGV 1 iso time  2 seconds to keep the job  3 batch to end if nothing is left, or ''
--      4.. job ids
-- Writes rq:job:<id>, rq:canceled:<q>, the batch's keys; ends qsvc:stream:<id> if it is there.
-- The ids stay in their queue's list: the claim drops what is not queued.
-- Returns how many were cancelled, then the names of the workers that run some of them.
local iso, keep = ARGV[1], tonumber(ARGV[2])
local now, n, workers, seen = math.floor(redis_now()), 0, {}, {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'worker_name', 'origin')
  if f[1] == 'queued' or f[1] == 'started' or f[1] == 'deferred' or f[1] == 'scheduled' then
    n = n + 1
    redis.call('HSET', jk, 'status', 'canceled', 'ended_at', iso)
    redis.call('HDEL', jk, 'qsvc_execution')
    local is_line = redis.call('HEXISTS', jk, 'qsvc_batch') == 1
    if not is_line then redis.call('EXPIRE', jk, keep) end
    redis.call('ZADD', RQ .. ':canceled:' .. f[3], is_line and '+inf' or now + keep, id)
    settle_line(id, 'cancelled')
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
