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

-- Return a number from a job's hash, which anybody may have written.
local function number(value, otherwise) return tonumber(value) or otherwise end

-- Return a JSON list from a job's hash; empty when it is none.
local function json_list(text)
  local is_json, value = pcall(cjson.decode, text or '')
  return is_json and type(value) == 'table' and value or {}
end

-- Run a command on a key with many arguments, in parts that Lua's stack holds; none do nothing.
local function call_many(command, key, items)
  for i = 1, #items, 4000 do
    redis.call(command, key, unpack(items, i, math.min(i + 3999, #items)))
  end
end

-- Let a batch's lane take turns with the queue itself.
local function open_lane(queues, main, lanes, batch)
  redis.call('SADD', queues, main, main .. ':' .. batch)
  if redis.call('EXISTS', lanes) == 0 then redis.call('RPUSH', lanes, '-') end
  if not redis.call('LPOS', lanes, batch) then redis.call('RPUSH', lanes, batch) end
end

-- Forget an execution: its lease, its hash, its places in the job's and the worker's indexes.
local function end_execution(wip, worker_executions, id, ex)
  local composite = id .. ':' .. ex
  redis.call('DEL', RQ .. ':execution:' .. composite)
  redis.call('ZREM', RQ .. ':executions:' .. id, ex)
  if worker_executions then redis.call('SREM', worker_executions, composite) end
  return redis.call('ZREM', wip, composite)
end

-- Drop what some executions of a job have generated.
local function drop_progress(id, executions)
  for _, ex in ipairs(executions) do
    if is_set(ex) then redis.call('DEL', 'qsvc:progress:' .. id .. ':' .. ex) end
  end
end

-- Delete a job of a queue with all that belongs to it, also an execution that still runs.
local function delete_job(id, queue)
  local executions, jk = RQ .. ':executions:' .. id, job_key(id)
  for _, ex in ipairs(redis.call('ZRANGE', executions, 0, -1)) do
    end_execution(RQ .. ':wip:' .. queue, nil, id, ex)
    redis.call('DEL', 'qsvc:progress:' .. id .. ':' .. ex)
  end
  drop_progress(id, redis.call('HMGET', jk, 'qsvc_execution', 'qsvc_resume'))
  redis.call('DEL', jk, RQ .. ':results:' .. id, executions, jk .. ':dependents',
    jk .. ':dependencies', 'qsvc:stream:' .. id, 'qsvc:trace:' .. id)
  for _, registry in ipairs({':finished:', ':failed:', ':canceled:', ':scheduled:'}) do
    redis.call('ZREM', RQ .. registry .. queue, id)
  end
end

local BATCH_PARTS = {'', ':lines', ':done', ':errors', ':outcomes'}
-- What <batch>:outcomes holds, two bits a line; 0 while the line has not ended.
local OUTCOMES = {'completed', 'failed', 'cancelled'}
local OUTCOME_BITS = {completed = 1, failed = 2, cancelled = 3}

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
    for _, part in ipairs(BATCH_PARTS) do redis.call('EXPIRE', key .. part, keep) end
  end
end

-- The job of a batch's line. It names the line's entry in <batch>:done, so that this can go when
-- the line runs again: each line has one.
local function line_job_key(key, line)
  return job_key(string.sub(key, #batch_key('') + 1) .. '-' .. line)
end

-- Note how a line of a batch ended and return its entry in <batch>:done; false when it had ended
-- already, or the line is none. The caller counts it and has the line's job name the entry.
local function note_outcome(key, line, outcome)
  local bits, at = key .. ':outcomes', '#' .. line
  local before = redis.pcall('BITFIELD', bits, 'SET', 'u2', at, OUTCOME_BITS[outcome])[1]
  if before ~= 0 then
    if before then redis.call('BITFIELD', bits, 'SET', 'u2', at, before) end
    return false
  end
  return redis.call('XADD', key .. ':done', '*', 'l', line, 's', outcome)
end

local function name_entry(jk, entry)
  if redis.call('EXISTS', jk) == 1 then redis.call('HSET', jk, 'qsvc_done', entry) end
end

-- Count a batch's line as ended, once; true when it was counted.
local function settle_line(key, line, outcome)
  local entry = redis.call('EXISTS', key) == 1 and note_outcome(key, line, outcome)
  if not entry then return false end
  name_entry(line_job_key(key, line), entry)
  redis.call('HINCRBY', key, outcome, 1)
  close_batch(key)
  return true
end

-- Keep the error of a line whose job is gone, for as long as its batch is kept.
local function keep_error(key, line, err)
  redis.call('HSET', key .. ':errors', line, err)
  local milliseconds = redis.call('PTTL', key)
  if milliseconds > 0 then redis.call('PEXPIRE', key .. ':errors', milliseconds) end
end

-- Take a batch that had ended, or was about to, back into progress.
local function reopen_batch(key)
  redis.call('HSET', key, 'status', 'in_progress')
  redis.call('HDEL', key, 'ending', 'completed_at', 'finalizing_at', 'cancelled_at',
    'cancelling_at', 'expired_at')
  local expires_at = redis.call('HGET', key, 'expires_at')
  if expires_at and tonumber(expires_at) <= redis_now() then
    redis.call('HDEL', key, 'expires_at')
  end
  for _, part in ipairs(BATCH_PARTS) do redis.call('PERSIST', key .. part) end
end

-- Count a line as not ended: it runs again.
local function reopen_line(key, line)
  if redis.call('EXISTS', key) == 0 then return end
  local before = redis.pcall('BITFIELD', key .. ':outcomes', 'SET', 'u2', '#' .. line, 0)[1]
  if not OUTCOMES[before] then return end
  redis.call('HINCRBY', key, OUTCOMES[before], -1)
  local entry = redis.call('HGET', line_job_key(key, line), 'qsvc_done')
  if entry then redis.call('XDEL', key .. ':done', entry) end
  reopen_batch(key)
end
