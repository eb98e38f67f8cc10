-- BEAT: renew the leases of everything a worker runs, and the worker itself.
-- KEYS 1 rq:worker:<w>  2 rq:worker:<w>:executions  3 rq:workers  4 rq:suspended
--      5 qsvc:worker:<w>  6 qsvc:model:<alias>  then per queue: rq:wip:<q>, rq:workers:<q>
-- ARGV 1 iso time  2 lease seconds  3 seconds the worker's own keys live  4 JSON of the
--      fields of the two cards  then per execution: queue index from 0, job id, execution id
-- Writes also rq:job:<id>, rq:execution:<id>:<ex>, rq:executions:<id>.
-- Returns 1 if the worker's hash was there, 1 if workers are suspended, {{execution, status}…}
-- of the executions that are no longer ours, and the executions whose job somebody watches.
local wkey, wex, workers, suspended = unpack(KEYS, 1, 4)
local iso, lease, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = redis_now()
-- First, since it needs no memory: a full server refuses a script's first write, not later ones,
-- and leases must not end while it is full.
redis.call('EXPIRE', wkey, keep)
local lost, watched = {}, {}
for i = 5, #ARGV, 3 do
  local wip, id, ex = KEYS[7 + 2 * tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2]
  local composite, jk = id .. ':' .. ex, job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'qsvc_execution')
  if not redis.call('ZSCORE', wip, composite) or f[1] ~= 'started' or f[2] ~= ex then
    lost[#lost + 1] = {ex, f[1] or 'deleted'}
  else
    local ek = RQ .. ':execution:' .. composite
    redis.call('ZADD', wip, 'XX', math.floor(now) + lease, composite)
    redis.call('HSET', ek, 'last_heartbeat', now)
    redis.call('EXPIRE', ek, lease)
    redis.call('ZADD', RQ .. ':executions:' .. id, 'XX', now + lease + 60, ex)
    redis.call('EXPIRE', RQ .. ':executions:' .. id, lease + 60)
    redis.call('HSET', jk, 'last_heartbeat', iso)
    if redis.call('EXISTS', 'qsvc:watch:' .. id) == 1 then watched[#watched + 1] = ex end
  end
end
redis.call('SADD', workers, wkey)
for q = 8, #KEYS, 2 do redis.call('SADD', KEYS[q], wkey) end
redis.call('HSET', wkey, 'last_heartbeat', iso)
redis.call('EXPIRE', wkey, keep)
redis.call('EXPIRE', wex, keep)
for i, fields in ipairs(cjson.decode(ARGV[4])) do
  for field, value in pairs(fields) do redis.call('HSET', KEYS[4 + i], field, value) end
  redis.call('EXPIRE', KEYS[4 + i], keep)
end
return {redis.call('HEXISTS', wkey, 'birth'), redis.call('EXISTS', suspended), lost, watched}
