-- FINISH: end executions with their outcomes: results, registries, counters, batches, stream
-- ends; or put jobs up for another try. Each is accepted only while the execution holds its
-- lease and the job is started by it, so once.
-- KEYS 1 rq:wip:<q>  2 rq:finished:<q>  3 rq:failed:<q>  4 rq:worker:<w>
--      5 rq:worker:<w>:executions  6 rq:queue:<q>  7 rq:scheduled:<q>  8 qsvc:aftercare:<q>
-- ARGV 1 iso time  2 worker name  3 most tries of a transient failure  4 seconds after which
--      another worker may take over the aftercare
--      then per execution: job id, execution id, status (finished, failed, stopped), seconds to
--      keep (0 delete at once, -1 for ever), start, end (epoch), result payload, error (JSON) or
--      '', prompt tokens, completion tokens, cached tokens, the stream's last entry as a JSON
--      array, seconds to keep the stream, '1' to end the stream even when it has no entry yet,
--      '1' when the job's own Retry applies, seconds until a transient failure is tried again or ''
-- Writes also rq:job:<id>, rq:results:<id>, rq:executions:<id>, the batches' keys,
-- qsvc:stream:<id>; drops rq:execution:<id>:<ex>, qsvc:progress:<id>:<ex>.
-- Returns for each: ok; aftercare (ok, and <id>:<ex>:<status> is in qsvc:aftercare:<q> for the
-- job's dependents, callbacks or rate limit); retry; lost (not our lease); or the status that
-- refused the result.
local wip, finished, failed, wkey, wex, queue, scheduled, aftercare = unpack(KEYS)
local iso, worker, most_tries, care_seconds = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local STEP = 16
-- A job that asked to be deleted at its end stays so long for its aftercare to read.
local CARE_SECONDS = 300
local now = redis_now()
local seconds_now = math.floor(now)
local counts = {finished = 0, failed = 0, working = 0}
local batches = {}

-- Put a job up again, now or after some seconds.
local function again(jk, id, seconds, at_front)
  redis.call('HSET', jk, 'started_at', '', 'worker_name', '')
  if seconds > 0 then
    redis.call('HSET', jk, 'status', 'scheduled')
    redis.call('ZADD', scheduled, seconds_now + seconds, id)
  else
    redis.call('HSET', jk, 'status', 'queued', 'enqueued_at', iso)
    redis.call(at_front and 'LPUSH' or 'RPUSH', queue, id)
  end
end

-- The reply to an outcome that was sent before and whose first reply was lost.
local function was_accepted(id, ex)
  local last = redis.call('XREVRANGE', RQ .. ':results:' .. id, '+', '-', 'COUNT', 1)[1]
  if not last then return false end
  for i = 1, #last[2], 2 do
    if last[2][i] == 'execution_id' then return last[2][i + 1] == ex end
  end
  return false
end

-- Note a line's end; its batch is counted up once for all lines of this call.
local function settle(batch, line, outcome, prompt, completion, cached)
  local key = batch_key(batch)
  local b = batches[key]
  if b == nil then
    b = redis.call('EXISTS', key) == 1
      and {completed = 0, failed = 0, prompt = 0, completion = 0, cached = 0}
    batches[key] = b
  end
  if not b or not note_outcome(key, line, outcome) then return end
  b[outcome] = b[outcome] + 1
  b.prompt, b.completion, b.cached = b.prompt + prompt, b.completion + completion, b.cached + cached
end

local FIELDS = {'status', 'retries_left', 'qsvc_auto_retry', 'retry_intervals', 'repeats_left',
  'repeat_intervals', 'success_callback_name', 'failure_callback_name', 'stopped_callback_name',
  'rate_limit_key', 'enqueue_at_front_on_retry', 'qsvc_batch', 'qsvc_line', 'qsvc_transient',
  'qsvc_generation', 'qsvc_execution'}

-- What belongs to the ended executions, dropped by one command each at the end.
local ended, ended_keys = {}, {}

local function finish_one(at)
  local id, ex, status, keep = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local start, finish, payload, err = ARGV[at + 4], ARGV[at + 5], ARGV[at + 6], ARGV[at + 7]
  local jk, composite = job_key(id), id .. ':' .. ex
  local held = redis.call('ZREM', wip, composite) == 1
  ended[#ended + 1] = composite
  ended_keys[#ended_keys + 1] = RQ .. ':execution:' .. composite
  ended_keys[#ended_keys + 1] = 'qsvc:progress:' .. composite
  redis.pcall('ZREM', RQ .. ':executions:' .. id, ex)
  if not held then return was_accepted(id, ex) and 'ok' or 'lost' end
  local f = redis.call('HMGET', jk, unpack(FIELDS))
  if not f[1] then return 'deleted' end
  if f[1] ~= 'started' then return f[1] end
  if f[16] ~= ex then return 'lost' end

  counts[status == 'finished' and 'finished' or 'failed'] =
    counts[status == 'finished' and 'finished' or 'failed'] + 1
  counts.working = counts.working + tonumber(finish) - tonumber(start)

  local user_retries = f[3] ~= '1' and number(f[2], 0) or 0
  local transient_seconds = ARGV[at + 15]
  if transient_seconds ~= '' then
    local tries = number(f[14], 0) + 1
    if tries <= most_tries then
      redis.call('HSET', jk, 'qsvc_transient', tries)
      redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_alone')
      again(jk, id, tonumber(transient_seconds), true)
      return 'retry'
    end
  elseif ARGV[at + 14] == '1' and user_retries > 0 then
    local intervals = json_list(f[4])
    local seconds = number(intervals[math.max(#intervals - user_retries, 0) + 1], 0)
    redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_alone')
    redis.call('HSET', jk, 'retries_left', user_retries - 1)
    again(jk, id, seconds, f[11] == '1')
    return 'retry'
  end

  local outcome = status == 'finished' and 'completed' or 'failed'
  if is_set(f[12]) then
    settle(f[12], f[13], outcome, tonumber(ARGV[at + 8]), tonumber(ARGV[at + 9]),
      tonumber(ARGV[at + 10]))
  end
  local drop = {'qsvc_execution', 'qsvc_alone', 'qsvc_deaths', 'qsvc_reached', 'qsvc_transient',
    'qsvc_write'}
  if f[3] == '1' then
    drop[7], drop[8] = 'qsvc_auto_retry', 'retries_left'
  end
  redis.call('HDEL', jk, unpack(drop))
  local stream = 'qsvc:stream:' .. id
  if ARGV[at + 13] == '1' or redis.call('EXISTS', stream) == 1 then
    redis.pcall('XADD', stream, '*', unpack(cjson.decode(ARGV[at + 11])))
    redis.call('EXPIRE', stream, ARGV[at + 12])
  end

  local callback = status == 'finished' and f[7] or status == 'failed' and f[8]
    or status == 'stopped' and f[9]
  local needs_care = is_set(callback) or is_set(f[10])
    or redis.call('EXISTS', jk .. ':dependents') == 1
  local repeats = status == 'finished' and number(f[5], 0) or 0
  local results = RQ .. ':results:' .. id
  if keep == 0 and not needs_care and repeats == 0 then
    redis.call('DEL', jk, results, RQ .. ':executions:' .. id)
    return 'ok'
  end
  redis.call('HSET', jk, 'status', status, 'ended_at', iso, 'last_heartbeat', iso,
    'qsvc_settled', outcome)
  if keep ~= 0 or needs_care then
    local entry = {'type', status == 'finished' and 1 or 2, 'worker_name', worker,
      'execution_id', ex, 'execution_started_at', start, 'execution_ended_at', finish,
      status == 'finished' and 'return_value' or 'exc_string', payload}
    if err ~= '' then
      entry[#entry + 1] = 'qsvc_error'
      entry[#entry + 1] = err
    end
    local added = redis.pcall('XADD', results, 'MAXLEN', '~', 10, '*', unpack(entry))
    if type(added) == 'table' and added.err then
      -- Somebody put another type there. Half of this script has run: the result must go in.
      redis.call('DEL', results)
      redis.call('XADD', results, '*', unpack(entry))
    end
  end
  local registry = status == 'finished' and finished or failed
  if repeats > 0 then
    local intervals = json_list(f[6])
    local seconds = number(intervals[1], 0)
    if #intervals > 1 then
      table.remove(intervals, 1)
      redis.call('HSET', jk, 'repeat_intervals', cjson.encode(intervals))
    end
    redis.call('HSET', jk, 'repeats_left', repeats - 1, 'qsvc_generation', number(f[15], 0) + 1)
    redis.call('HDEL', jk, 'qsvc_settled')
    again(jk, id, seconds, false)
  elseif keep > 0 and not is_set(f[12]) then
    redis.call('EXPIRE', jk, keep)
    redis.call('ZADD', registry, seconds_now + keep, id)
  elseif keep ~= 0 then  -- for ever; or until its batch has ended, whose end sets the time
    redis.call('ZADD', registry, '+inf', id)
  else
    redis.call('EXPIRE', jk, CARE_SECONDS)
  end
  if keep == 0 then
    redis.call('EXPIRE', results, CARE_SECONDS)
  elseif keep > 0 and not is_set(f[12]) then
    redis.call('EXPIRE', results, keep)
  else
    redis.call('PERSIST', results)
  end
  if needs_care then
    redis.call('ZADD', aftercare, now + care_seconds, composite .. ':' .. status)
    return 'aftercare'
  end
  return 'ok'
end

local replies = {}
for at = 5, #ARGV, STEP do replies[#replies + 1] = finish_one(at) end
if #ended > 0 then
  redis.call('SREM', wex, unpack(ended))
  redis.call('DEL', unpack(ended_keys))
end
if counts.finished > 0 then redis.call('HINCRBY', wkey, 'successful_job_count', counts.finished) end
if counts.failed > 0 then redis.call('HINCRBY', wkey, 'failed_job_count', counts.failed) end
if counts.working > 0 then
  redis.call('HINCRBYFLOAT', wkey, 'total_working_time', string.format('%.6f', counts.working))
end
for key, b in pairs(batches) do
  if b then
    for _, name in ipairs({'completed', 'failed'}) do
      if b[name] > 0 then redis.call('HINCRBY', key, name, b[name]) end
    end
    if b.prompt > 0 then
      redis.call('HINCRBY', key, 'prompt_tokens', b.prompt)
      redis.call('HINCRBY', key, 'completion_tokens', b.completion)
      redis.call('HINCRBY', key, 'cached_tokens', b.cached)
    end
    close_batch(key)
  end
end
return replies
