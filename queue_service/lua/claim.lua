-- CLAIM: take up to n jobs from several queues in their order and start an execution of each.
-- Within one queue the jobs that were enqueued singly and each batch's lane get equal turns.
-- KEYS 1 rq:worker:<w>  2 rq:worker:<w>:executions  3 rq:suspended  4 rq:queues
--      then per queue: rq:queue:<q>, rq:wip:<q>, qsvc:lanes:<q>
-- ARGV 1 worker name  2 iso time  3 lease seconds  4 n  5 crash retries  6 format version
--      7.. n execution ids
-- Reads also rq:queue:<q>:<batch> (a lane). Writes also rq:job:<id>,
-- rq:execution:<id>:<ex>, rq:executions:<id>; drops qsvc:progress:<id>:<earlier execution>.
-- Ids that are no longer queued (cancelled, deleted, pushed twice) are dropped on the way; jobs
-- of a newer format stay where they are.
-- A job that still names an earlier execution was lost with its worker: that death is charged
-- to it unless it had come further than ever before. Only a death alone counts beyond a suspect.
-- Returns {{id, execution, queue index from 0, flat hash}…}, number of ids looked at.
local wkey, wex, suspended, queues = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, iso, lease, n = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local crash_retries = tonumber(ARGV[5])
local out, looked = {}, 0
if redis.call('EXISTS', suspended) == 1 then return {out, 0} end
local now = redis_now()

local function tokens_of(progress)
  local tokens = 0
  for _, ids in ipairs(redis.call('LRANGE', progress, 1, -1)) do tokens = tokens + #ids / 4 end
  return tokens
end

local function charge_death(id, jk, earlier, alone, reached)
  local progress = 'qsvc:progress:' .. id .. ':' .. earlier
  local tokens = tokens_of(progress)
  redis.call('DEL', progress)
  redis.call('HDEL', jk, 'qsvc_alone')
  if tokens > tonumber(reached or 0) then
    redis.call('HSET', jk, 'qsvc_deaths', 0, 'qsvc_reached', tokens)
  elseif alone then
    redis.call('HINCRBY', jk, 'qsvc_deaths', 1)
  elseif tonumber(redis.call('HGET', jk, 'qsvc_deaths') or 0) < crash_retries then
    redis.call('HINCRBY', jk, 'qsvc_deaths', 1)
  end
end

local function start(id, jk, f, wip, queue_index)
  local ex = ARGV[7 + #out]
  local composite = id .. ':' .. ex
  local ek = RQ .. ':execution:' .. composite
  redis.call('HSET', ek, 'id', ex, 'job_id', id, 'created_at', now, 'last_heartbeat', now,
    'worker_name', worker)
  redis.call('EXPIRE', ek, lease)
  redis.call('ZADD', RQ .. ':executions:' .. id, now + lease + 60, ex)
  redis.call('EXPIRE', RQ .. ':executions:' .. id, lease + 60)
  redis.call('ZADD', wip, math.floor(now) + lease, composite)
  redis.call('SADD', wex, composite)
  if is_set(f[2]) then charge_death(id, jk, f[2], is_set(f[5]), f[6]) end
  redis.call('HSET', jk, 'status', 'started', 'started_at', iso, 'last_heartbeat', iso,
    'worker_name', worker, 'qsvc_execution', ex)
  redis.call('HINCRBY', jk, 'qsvc_attempt', 1)
  redis.call('PERSIST', jk)
  -- Stock RQ tools fail an abandoned job that has no retries left. The budget is filled up at
  -- every claim: how often a job may lose its worker is ours to count.
  if not is_set(f[3]) or f[4] == '1' then
    redis.call('HSET', jk, 'retries_left', 2, 'enqueue_at_front_on_retry', '1',
      'qsvc_auto_retry', '1')
  end
  -- A plain job's description is RQ's repr of its arguments: the prompt.
  if redis.call('HEXISTS', jk, 'qsvc_batch') == 0 then
    redis.call('HSET', jk, 'description', 'qsvc request')
  end
  out[#out + 1] = {id, ex, queue_index, redis.call('HGETALL', jk)}
end

for q = 5, #KEYS, 3 do
  local main, wip, lanes = KEYS[q], KEYS[q + 1], KEYS[q + 2]
  local newer, misses = {}, 0
  while #out < n and looked < 2000 do
    local lane = redis.call('LMOVE', lanes, lanes, 'LEFT', 'RIGHT') or '-'
    local list = lane == '-' and main or main .. ':' .. lane
    local id = redis.call('LPOP', list)
    if id then
      misses = 0
      looked = looked + 1
      local jk = job_key(id)
      local f = redis.call('HMGET', jk, 'status', 'qsvc_execution', 'retries_left',
        'qsvc_auto_retry', 'qsvc_alone', 'qsvc_reached', 'qsvc_v')
      if f[1] == 'queued' then
        if tonumber(f[7] or 1) > tonumber(ARGV[6]) then
          newer[#newer + 1] = {list, id}
        else
          start(id, jk, f, wip, (q - 5) / 3)
        end
      end
    else
      if lane ~= '-' then
        redis.call('LREM', lanes, 1, lane)
        redis.call('SREM', queues, list)
        if redis.call('LLEN', lanes) == 1 then redis.call('DEL', lanes) end
      else
        misses = misses + 1
      end
      if misses > redis.call('LLEN', lanes) then break end
    end
  end
  for i = #newer, 1, -1 do redis.call('LPUSH', newer[i][1], newer[i][2]) end
end
if #out > 0 then
  redis.call('HSET', wkey, 'state', 'busy')
  redis.call('EXPIRE', wex, lease + 60)
end
return {out, looked}
