-- FINISH: end executions with their outcomes: results, registries, counters, batches, stream
-- ends; or put jobs up for another try. Each is accepted only while the execution holds its
-- lease and the job is started by it, so once.
-- KEYS 1 rq:wip:<q>  2 rq:finished:<q>  3 rq:failed:<q>  4 rq:worker:<w>
--      5 rq:worker:<w>:executions  6 rq:queue:<q>  7 rq:scheduled:<q>  8 qsvc:aftercare:<q>
-- ARGV 1 iso time  2 worker name  3 most tries of a transient failure  4 seconds after which
--      another worker may take over the aftercare
--      then per execution: result payload, and a JSON array of: job id, execution id, status
--      (finished, failed, stopped), seconds to keep (0 delete at once, -1 for ever), start, end
--      (epoch, as texts), error (JSON) or '', prompt tokens, completion tokens, cached tokens, the
--      stream's last entry as an array, seconds to keep the stream, whether the stream is ended
--      even when it has no entry yet, whether the job's own Retry applies, and seconds until a
--      transient failure is tried again or -1
-- Writes also rq:job:<id>, rq:results:<id>, rq:executions:<id>, the batches' keys,
-- qsvc:stream:<id>; drops rq:execution:<id>:<ex>, qsvc:progress:<id>:<ex>. After a transient
-- failure the next try goes on with the latter.
-- Returns for each: ok; aftercare (ok, and <id>:<ex>:<status> is in qsvc:aftercare:<q> for the
-- job's dependents, callbacks or rate limit); retry; lost (not our lease); the status that
-- refused the result; or server error and its text, when a key of the job has a wrong type.
local wip, finished, failed, wkey, wex, queue, scheduled, aftercare = unpack(KEYS)
local iso, worker, most_tries, care_seconds = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
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

-- Note the end of a job's line; its batch is counted up once for all lines of this call. Returns
-- its entry in <batch>:done where this job is to name it.
local function settle(jk, batch, line, outcome, prompt, completion, cached)
  local key = batch_key(batch)
  local b = batches[key]
  if b == nil then
    b = redis.call('EXISTS', key) == 1
      and {completed = 0, failed = 0, prompt = 0, completion = 0, cached = 0}
    batches[key] = b
  end
  local entry = b and note_outcome(key, line, outcome)
  if not entry then return end
  b[outcome] = b[outcome] + 1
  b.prompt, b.completion, b.cached = b.prompt + prompt, b.completion + completion, b.cached + cached
  local named = line_job_key(key, line)
  if named == jk then return entry end
  name_entry(named, entry)
end

local CALLBACKS = {finished = 'success_callback_name', failed = 'failure_callback_name',
  stopped = 'stopped_callback_name'}

-- What belongs to the ended executions, dropped by one command each at the end, and what enters
-- the registries.
local ended, ended_keys, into_finished, into_failed = {}, {}, {}, {}
-- Executions whose progress the next one goes on with.
local has_progress = {}

local function finish_one(payload, outcome_of, composite, is_held, has_followers)
  local id, ex, status, keep, start, finish, err, prompt, completion, cached, stream_end,
    stream_keep, ends_stream, may_retry, transient_seconds = unpack(outcome_of)
  local jk, executions = job_key(id), RQ .. ':executions:' .. id
  local now_status, holder, batch, line, auto_retry, repeats_left, callback, limit, ended_before
  if is_held then
    now_status, holder, batch, line, auto_retry, repeats_left, callback, limit, ended_before =
      unpack(redis.call('HMGET', jk, 'status', 'qsvc_execution', 'qsvc_batch', 'qsvc_line',
        'qsvc_auto_retry', 'repeats_left', CALLBACKS[status], 'rate_limit_key', 'ended_at'))
  end
  if now_status ~= 'started' or holder ~= ex then
    redis.pcall('ZREM', executions, ex)
    if not is_held then return was_accepted(id, ex) and 'ok' or 'lost' end
    if not now_status then return 'deleted' end
    return now_status == 'started' and 'lost' or now_status
  end
  -- The claim has ended every other one.
  ended_keys[#ended_keys + 1] = executions

  counts[status == 'finished' and 'finished' or 'failed'] =
    counts[status == 'finished' and 'finished' or 'failed'] + 1
  counts.working = counts.working + tonumber(finish) - tonumber(start)

  local user_retries = 0
  if may_retry and auto_retry ~= '1' then
    user_retries = number(redis.call('HGET', jk, 'retries_left'), 0)
  end
  if transient_seconds >= 0 then
    local tries = number(redis.call('HGET', jk, 'qsvc_transient'), 0) + 1
    if tries <= most_tries then
      redis.call('HSET', jk, 'qsvc_transient', tries)
      redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_alone')
      -- What it would have gone on with is left to the next try.
      if redis.call('EXISTS', 'qsvc:progress:' .. composite) == 1 then
        redis.call('HSET', jk, 'qsvc_resume', ex)
        has_progress[composite] = true
      end
      again(jk, id, transient_seconds, true)
      return 'retry'
    end
  elseif user_retries > 0 then
    local f = redis.call('HMGET', jk, 'retry_intervals', 'enqueue_at_front_on_retry')
    local intervals = json_list(f[1])
    local seconds = number(intervals[math.max(#intervals - user_retries, 0) + 1], 0)
    redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_alone')
    redis.call('HSET', jk, 'retries_left', user_retries - 1)
    again(jk, id, seconds, f[2] == '1')
    return 'retry'
  end

  local outcome = status == 'finished' and 'completed' or 'failed'
  local done = is_set(batch) and settle(jk, batch, line, outcome, prompt, completion, cached)
  local drop = {'qsvc_execution', 'qsvc_alone', 'qsvc_deaths', 'qsvc_reached', 'qsvc_transient',
    'qsvc_write'}
  if auto_retry == '1' then
    drop[7], drop[8] = 'qsvc_auto_retry', 'retries_left'
  end
  redis.call('HDEL', jk, unpack(drop))
  local stream = 'qsvc:stream:' .. id
  if ends_stream or has_followers and redis.call('EXISTS', stream) == 1 then
    redis.pcall('XADD', stream, '*', unpack(stream_end))
    redis.call('EXPIRE', stream, stream_keep)
  end

  local needs_care = is_set(callback) or is_set(limit)
    or has_followers and redis.call('EXISTS', jk .. ':dependents') == 1
  local repeats = status == 'finished' and number(repeats_left, 0) or 0
  local results = RQ .. ':results:' .. id
  if keep == 0 and not needs_care and repeats == 0 then
    redis.call('DEL', jk, results)
    return 'ok'
  end
  local set = {'status', status, 'ended_at', iso, 'qsvc_settled', outcome}
  if done then set[7], set[8] = 'qsvc_done', done end
  redis.call('HSET', jk, unpack(set))
  if keep ~= 0 or needs_care then
    local entry = {'*', 'type', status == 'finished' and 1 or 2, 'worker_name', worker,
      'execution_id', ex, 'execution_started_at', start, 'execution_ended_at', finish,
      status == 'finished' and 'return_value' or 'exc_string', payload}
    if err ~= '' then
      entry[#entry + 1] = 'qsvc_error'
      entry[#entry + 1] = err
    end
    local added = ended_before
      and redis.pcall('XADD', results, 'MAXLEN', '~', 10, unpack(entry))
      or redis.pcall('XADD', results, unpack(entry))
    if type(added) == 'table' and added.err then
      -- Somebody put another type there. Half of this script has run: the result must go in.
      redis.call('DEL', results)
      redis.call('XADD', results, unpack(entry))
    end
  end
  local registry = status == 'finished' and into_finished or into_failed
  if repeats > 0 then
    local intervals = json_list(redis.call('HGET', jk, 'repeat_intervals'))
    local seconds = number(intervals[1], 0)
    if #intervals > 1 then
      table.remove(intervals, 1)
      redis.call('HSET', jk, 'repeat_intervals', cjson.encode(intervals))
    end
    redis.call('HSET', jk, 'repeats_left', repeats - 1, 'qsvc_generation',
      number(redis.call('HGET', jk, 'qsvc_generation'), 0) + 1)
    redis.call('HDEL', jk, 'qsvc_settled')
    again(jk, id, seconds, false)
  elseif keep > 0 and not is_set(batch) then
    redis.call('EXPIRE', jk, keep)
    registry[#registry + 1] = seconds_now + keep
    registry[#registry + 1] = id
  elseif keep ~= 0 then  -- for ever; or until its batch has ended, whose end sets the time
    registry[#registry + 1] = '+inf'
    registry[#registry + 1] = id
  else
    redis.call('EXPIRE', jk, CARE_SECONDS)
  end
  if keep == 0 then
    redis.call('EXPIRE', results, CARE_SECONDS)
  elseif keep > 0 and not is_set(batch) then
    redis.call('EXPIRE', results, keep)
  elseif ended_before then
    redis.call('PERSIST', results)
  end
  if needs_care then
    redis.call('ZADD', aftercare, now + care_seconds, composite .. ':' .. status)
    return 'aftercare'
  end
  return 'ok'
end

local outcomes = {}
local followers = {}  -- streams that somebody reads, and lists of dependents
for at = 6, #ARGV, 2 do
  local decoded = cjson.decode(ARGV[at])
  local id = decoded[1]
  local composite = id .. ':' .. decoded[2]
  outcomes[#outcomes + 1] = decoded
  ended[#ended + 1] = composite
  ended_keys[#ended_keys + 1] = RQ .. ':execution:' .. composite
  followers[#followers + 1] = 'qsvc:stream:' .. id
  followers[#followers + 1] = job_key(id) .. ':dependents'
end
if #ended == 0 then return {} end
local leases = redis.call('ZMSCORE', wip, unpack(ended))
-- The first write, and not under pcall: a server that cannot write refuses the whole call here.
redis.call('ZREM', wip, unpack(ended))
local has_followers = redis.call('EXISTS', unpack(followers)) > 0
local replies = {}
for i, composite in ipairs(ended) do
  local is_well, reply = pcall(finish_one, ARGV[3 + 2 * i], outcomes[i], composite, leases[i],
    has_followers)
  -- Somebody changed the type of a key of this job: the others must not suffer.
  replies[i] = is_well and reply or 'server error: ' .. (reply.err or tostring(reply))
  if not has_progress[composite] then
    ended_keys[#ended_keys + 1] = 'qsvc:progress:' .. composite
  end
end
redis.call('SREM', wex, unpack(ended))
redis.call('DEL', unpack(ended_keys))
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
call_many('ZADD', finished, into_finished)
call_many('ZADD', failed, into_failed)
return replies
