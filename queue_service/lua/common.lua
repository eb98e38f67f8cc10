-- Shared by every script: put before each one when it is loaded. RQ is RQ's key prefix.
-- Keys of single jobs, executions and batches are built here from ids, so these scripts need
-- one Redis (no cluster), as RQ does.
local RQ = '@RQ@'

local function redis_now()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end

local function is_set(value) return value and value ~= '' end

local function job_key(id) return RQ .. ':job:' .. id end

local function batch_key(id) return 'qsvc:batch:' .. id end

-- Forget an execution: its lease, its hash, its places in the job's and the worker's indexes.
local function end_execution(wip, worker_executions, id, ex)
  local composite = id .. ':' .. ex
  redis.call('DEL', RQ .. ':execution:' .. composite)
  redis.call('ZREM', RQ .. ':executions:' .. id, ex)
  if worker_executions then redis.call('SREM', worker_executions, composite) end
  return redis.call('ZREM', wip, composite)
end

-- End a batch whose lines have all ended and that nobody adds to any more.
local function close_batch(key)
  local b = redis.call('HMGET', key, 'status', 'submitted', 'total', 'completed', 'failed',
    'cancelled', 'retention_seconds')
  local status = b[1]
  if b[2] ~= '1' or (status ~= 'in_progress' and status ~= 'cancelling') then return end
  local ended = tonumber(b[4] or 0) + tonumber(b[5] or 0) + tonumber(b[6] or 0)
  if ended < tonumber(b[3] or 0) then return end
  local now = math.floor(redis_now())
  if status == 'cancelling' then
    local final = redis.call('HGET', key, 'ending') or 'cancelled'
    redis.call('HSET', key, 'status', final, final .. '_at', now)
  else
    redis.call('HSET', key, 'status', 'completed', 'finalizing_at', now, 'completed_at', now)
  end
  local keep = tonumber(b[7] or 0)
  if keep > 0 then
    redis.call('ZADD', 'qsvc:closing', now, string.match(key, '([^:]+)$'))
    for _, suffix in ipairs({'', ':lines', ':done', ':errors'}) do
      redis.call('EXPIRE', key .. suffix, keep)
    end
  end
end

-- Count a batch line as ended, once: outcome is completed, failed or cancelled.
local function settle_line(id, outcome, prompt_tokens, completion_tokens, cached_tokens)
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'qsvc_batch', 'qsvc_line')
  if not is_set(f[1]) then return end
  if redis.call('HSETNX', jk, 'qsvc_settled', outcome) == 0 then return end
  local key = batch_key(f[1])
  if redis.call('EXISTS', key) == 0 then return end
  redis.call('HINCRBY', key, outcome, 1)
  if prompt_tokens then
    redis.call('HINCRBY', key, 'prompt_tokens', prompt_tokens)
    redis.call('HINCRBY', key, 'completion_tokens', completion_tokens)
    redis.call('HINCRBY', key, 'cached_tokens', cached_tokens)
  end
  redis.call('XADD', key .. ':done', '*', 'l', f[2], 's', outcome)
  close_batch(key)
end
