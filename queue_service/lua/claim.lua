-- CLAIM: take up to n jobs from several queues in their order and start an execution of each.
-- KEYS 1 rq:worker:<w>  2 rq:worker:<w>:executions  3 rq:suspended
--      then per queue: rq:queue:<q>, rq:wip:<q>
-- ARGV 1 worker name  2 iso time  3 lease seconds  4 n  5 crash retries  6.. n execution ids
-- Writes also rq:job:<id>, rq:execution:<id>:<ex>, rq:executions:<id>; drops
-- qsvc:progress:<id>:<earlier execution>.
-- Ids that are no longer queued (cancelled, deleted, pushed twice) are dropped on the way.
-- A job that still names an earlier execution was lost with its worker: that death is charged
-- to it unless it had made progress.
-- Returns {{id, execution, queue index from 0, flat hash}…, …}, number of ids looked at.
local wkey, wex, suspended = KEYS[1], KEYS[2], KEYS[3]
local worker, iso, lease, n = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local out, looked = {}, 0
if redis.call('EXISTS', suspended) == 1 then return {out, 0} end
local now = redis_now()
for q = 4, #KEYS, 2 do
  local queue, wip = KEYS[q], KEYS[q + 1]
  while #out < n and looked < 2000 do
    local id = redis.call('LPOP', queue)
    if not id then break end
    looked = looked + 1
    local jk = job_key(id)
    local f = redis.call('HMGET', jk, 'status', 'qsvc_execution', 'retries_left', 'qsvc_auto_retry')
    if f[1] == 'queued' then
      local ex = ARGV[6 + #out]
      local composite = id .. ':' .. ex
      local ek = RQ .. ':execution:' .. composite
      redis.call('HSET', ek, 'id', ex, 'job_id', id, 'created_at', now,
        'last_heartbeat', now, 'worker_name', worker)
      redis.call('EXPIRE', ek, lease)
      redis.call('ZADD', RQ .. ':executions:' .. id, now + lease + 60, ex)
      redis.call('EXPIRE', RQ .. ':executions:' .. id, lease + 60)
      redis.call('ZADD', wip, math.floor(now) + lease, composite)
      redis.call('SADD', wex, composite)
      if is_set(f[2]) then
        local progress = 'qsvc:progress:' .. id .. ':' .. f[2]
        if redis.call('DEL', progress) == 1 then
          redis.call('HSET', jk, 'qsvc_deaths', 0)
        else
          redis.call('HINCRBY', jk, 'qsvc_deaths', 1)
        end
      end
      redis.call('HSET', jk, 'status', 'started', 'started_at', iso, 'last_heartbeat', iso,
        'worker_name', worker, 'qsvc_execution', ex)
      redis.call('HINCRBY', jk, 'qsvc_attempt', 1)
      redis.call('PERSIST', jk)
      -- Stock RQ tools fail an abandoned job that has no retries left. The budget is filled
      -- up at every claim: how often a job may lose its worker is ours to count.
      if not is_set(f[3]) or f[4] == '1' then
        redis.call('HSET', jk, 'retries_left', ARGV[5], 'enqueue_at_front_on_retry', '1',
          'qsvc_auto_retry', '1')
      end
      -- A plain job's description is RQ's repr of its arguments: the prompt.
      if redis.call('HEXISTS', jk, 'qsvc_batch') == 0 then
        redis.call('HSET', jk, 'description', 'qsvc request')
      end
      out[#out + 1] = {id, ex, (q - 4) / 2, redis.call('HGETALL', jk)}
    end
  end
end
if #out > 0 then
  redis.call('HSET', wkey, 'state', 'busy')
  redis.call('EXPIRE', wex, lease + 60)
end
return {out, looked}
