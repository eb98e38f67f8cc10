-- FINISH: end one execution with its outcome: result, registries, counters, batch, stream end;
-- or put the job up for another try. Accepted only while the execution holds its lease and the
-- job is started, so once.
-- KEYS 1 rq:wip:<q>  2 rq:finished:<q> or rq:failed:<q>  3 rq:worker:<w>
--      4 rq:worker:<w>:executions  5 rq:queue:<q>  6 rq:scheduled:<q>  7 qsvc:aftercare:<q>
-- ARGV 1 job id  2 execution id  3 status (finished, failed, stopped)  4 iso time
--      5 seconds to keep (0 delete at once, -1 for ever)  6 worker name
--      7 execution start  8 execution end (epoch)  9 result type  10 result field
--      11 result payload  12 error (JSON) or ''  13 batch outcome
--      14 prompt tokens  15 completion tokens  16 cached tokens
--      17 the stream's last entry as a JSON array  18 seconds to keep the stream
--      19 '1' to end the stream even when it has no entry yet
--      20 '1' when the job's own Retry applies to this failure
--      21 seconds until a transient failure is tried again, or ''  22 most such tries
--      23 seconds after which another worker may take over the aftercare
-- Writes also rq:job:<id>, rq:results:<id>, the batch's keys, qsvc:stream:<id>;
-- drops qsvc:progress:<id>:<execution>.
-- Returns ok; aftercare (ok, and the job is in qsvc:aftercare:<q> for its dependents, callbacks
-- or rate limit); retry; lost (not our lease); or the status that refused the result.
local wip, registry, wkey, wex, queue, scheduled, aftercare = unpack(KEYS)
local id, ex, status, iso, keep = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local jk = job_key(id)
local held = redis.call('ZSCORE', wip, id .. ':' .. ex)
end_execution(wip, wex, id, ex)
redis.call('DEL', 'qsvc:progress:' .. id .. ':' .. ex)
if not held then
  -- Sent a second time because the first reply was lost: it was accepted then.
  local last = redis.call('XREVRANGE', RQ .. ':results:' .. id, '+', '-', 'COUNT', 1)[1]
  if last then
    for i = 1, #last[2], 2 do
      if last[2][i] == 'execution_id' and last[2][i + 1] == ex then return 'ok' end
    end
  end
  return 'lost'
end
local f = redis.call('HMGET', jk, 'status', 'retries_left', 'qsvc_auto_retry', 'retry_intervals',
  'repeats_left', 'repeat_intervals', 'success_callback_name', 'failure_callback_name',
  'stopped_callback_name', 'rate_limit_key', 'enqueue_at_front_on_retry')
if not f[1] then return 'deleted' end
if f[1] ~= 'started' then return f[1] end

redis.call('HINCRBY', wkey, status == 'finished' and 'successful_job_count' or 'failed_job_count', 1)
redis.call('HINCRBYFLOAT', wkey, 'total_working_time', tonumber(ARGV[8]) - tonumber(ARGV[7]))
redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_alone')

-- Put the job up again, now or after some seconds.
local function again(seconds, at_front)
  redis.call('HSET', jk, 'started_at', '', 'worker_name', '')
  if seconds > 0 then
    redis.call('HSET', jk, 'status', 'scheduled')
    redis.call('ZADD', scheduled, math.floor(redis_now()) + seconds, id)
  else
    redis.call('HSET', jk, 'status', 'queued', 'enqueued_at', iso)
    redis.call(at_front and 'LPUSH' or 'RPUSH', queue, id)
  end
end

local user_retries = f[3] ~= '1' and tonumber(f[2] or 0) or 0
if ARGV[21] ~= '' then
  if redis.call('HINCRBY', jk, 'qsvc_transient', 1) <= tonumber(ARGV[22]) then
    again(tonumber(ARGV[21]), true)
    return 'retry'
  end
elseif ARGV[20] == '1' and user_retries > 0 then
  local seconds = 0
  if is_set(f[4]) then
    local intervals = cjson.decode(f[4])
    if #intervals > 0 then seconds = intervals[math.max(#intervals - user_retries, 0) + 1] end
  end
  redis.call('HINCRBY', jk, 'retries_left', -1)
  again(seconds, f[11] == '1')
  return 'retry'
end

if f[3] == '1' then redis.call('HDEL', jk, 'qsvc_auto_retry', 'retries_left') end
redis.call('HDEL', jk, 'qsvc_deaths', 'qsvc_reached', 'qsvc_transient')
settle_line(id, ARGV[13], ARGV[14], ARGV[15], ARGV[16])
local stream = 'qsvc:stream:' .. id
if ARGV[19] == '1' or redis.call('EXISTS', stream) == 1 then
  redis.call('XADD', stream, '*', unpack(cjson.decode(ARGV[17])))
  redis.call('EXPIRE', stream, ARGV[18])
end

local callback = status == 'finished' and f[7] or status == 'failed' and f[8]
  or status == 'stopped' and f[9]
local needs_care = is_set(callback) or is_set(f[10])
  or redis.call('EXISTS', jk .. ':dependents') == 1
local repeats = status == 'finished' and tonumber(f[5] or 0) or 0
local results = RQ .. ':results:' .. id
if keep == 0 and not needs_care and repeats == 0 then
  redis.call('DEL', jk, results, RQ .. ':executions:' .. id)
  return 'ok'
end
redis.call('HSET', jk, 'status', status, 'ended_at', iso, 'last_heartbeat', iso)
if keep ~= 0 then
  local entry = {'type', ARGV[9], 'worker_name', ARGV[6], 'execution_id', ex,
    'execution_started_at', ARGV[7], 'execution_ended_at', ARGV[8], ARGV[10], ARGV[11]}
  if ARGV[12] ~= '' then
    entry[#entry + 1] = 'qsvc_error'
    entry[#entry + 1] = ARGV[12]
  end
  redis.call('XADD', results, 'MAXLEN', '~', 10, '*', unpack(entry))
end
if repeats > 0 then
  local seconds = 0
  if is_set(f[6]) then
    local intervals = cjson.decode(f[6])
    seconds = intervals[1] or 0
    if #intervals > 1 then
      table.remove(intervals, 1)
      redis.call('HSET', jk, 'repeat_intervals', cjson.encode(intervals))
    end
  end
  redis.call('HSET', jk, 'repeats_left', repeats - 1)
  redis.call('HINCRBY', jk, 'qsvc_generation', 1)
  again(seconds, false)
elseif keep > 0 then
  redis.call('EXPIRE', jk, keep)
  redis.call('ZADD', registry, math.floor(redis_now()) + keep, id)
elseif keep < 0 then
  redis.call('ZADD', registry, '+inf', id)
else
  redis.call('EXPIRE', jk, 300)  -- asked to be deleted at once: its aftercare still reads it
end
if keep > 0 then redis.call('EXPIRE', results, keep) else redis.call('PERSIST', results) end
if needs_care then
  redis.call('ZADD', aftercare, redis_now() + tonumber(ARGV[23]), id)
  return 'aftercare'
end
return 'ok'
