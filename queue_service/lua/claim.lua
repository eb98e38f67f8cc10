-- CLAIM: take up to n jobs from several queues in their order and start an execution of each.
-- Within one queue the jobs that were enqueued singly and each batch's lane get equal turns.
-- KEYS 1 rq:worker:<w>  2 rq:worker:<w>:executions  3 rq:suspended  4 rq:queues
--      then per queue: rq:queue:<q>, rq:wip:<q>, qsvc:lanes:<q>
-- ARGV 1 worker name  2 iso time  3 lease seconds  4 n  5 crash retries  6 format version
--      7.. n execution ids
-- Reads also rq:queue:<q>:<batch> (a lane), rq:finished:<q>, rq:failed:<q>, rq:canceled:<q>.
-- Writes also rq:job:<id>, rq:execution:<id>:<ex>, rq:executions:<id>, its batch's keys; drops what
-- is left of an earlier execution, whose qsvc:progress:<id>:<ex> becomes that of the new one.
-- Ids that are not queued (cancelled, deleted, pushed twice, ended) are dropped on the way; jobs
-- of a newer format stay where they are.
-- A job that still names an earlier execution was lost with its worker: that death is charged
-- to it unless it had come further than ever before. Only a death alone counts beyond a suspect.
-- The time to live of rq:execution:<id>:<ex> and rq:executions:<id> comes with the first beat: most
-- jobs have ended by then, and whatever ends an execution deletes both.
-- Returns {{id, queue index from 0, flat hash}…}, in the order of the execution ids, and the number
-- of ids taken from a queue. The hash is as it was before the claim, but for how often it was
-- claimed and its deaths, and without the fields that only tools read; qsvc_progress is what was
-- generated before, its elements each behind their length in eight hex digits.
local wkey, wex, suspended, queues = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, iso, lease, n = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local crash_retries, version = tonumber(ARGV[5]), tonumber(ARGV[6])
local out, looked = {}, 0
if redis.call('EXISTS', suspended) == 1 then return {out, 0} end
-- Does nothing, but a full server refuses it: no job is claimed whose answer has no room.
redis.call('LPUSHX', 'qsvc:none', '')
local now = redis_now()
-- As text, since a number is printed anew for each command that it is given to.
local now_text, index_end = string.format('%.6f', now), string.format('%.6f', now + lease + 60)
local lease_end = tostring(math.floor(now) + lease)

-- What of a job's hash is not sent to the worker, which has no use for it.
local UNSENT = {}
for _, field in ipairs({'status', 'created_at', 'started_at', 'ended_at',
  'last_heartbeat', 'worker_name', 'origin', 'description', 'meta', 'group_id', 'retries_left',
  'enqueue_at_front_on_retry', 'qsvc_v', 'qsvc_line', 'qsvc_execution', 'qsvc_write', 'qsvc_done',
  'qsvc_resume', 'qsvc_settled', 'qsvc_auto_retry', 'qsvc_attempt', 'qsvc_deaths'}) do
  UNSENT[field] = true
end

-- Nothing else of a job's meta is of use to the worker (see spans.py).
local function may_hold_trace_context(meta)
  return meta and #meta <= 8192 and string.find(meta, 'traceparent', 1, true)
end

-- Make the progress of an earlier execution that of a new one; return its elements.
local function take_over(id, earlier, ex)
  local key = 'qsvc:progress:' .. id .. ':'
  local elements = redis.call('LRANGE', key .. earlier, 0, -1)
  if #elements > 0 then redis.call('RENAME', key .. earlier, key .. ex) end
  return elements
end

-- Return how many token ids progress holds: they have the choice alone in front (see progress.py).
local function tokens_of(elements)
  local tokens = 0
  for _, element in ipairs(elements) do
    if string.byte(element, 4) == 0 then tokens = tokens + #element / 4 - 1 end
  end
  return tokens
end

local function join(elements)
  local parts = {}
  for i, element in ipairs(elements) do parts[i] = string.format('%08x', #element) .. element end
  return table.concat(parts)
end

-- Return the deaths and the furthest progress of a job whose last worker was lost.
local function charge_death(f, tokens)
  local deaths, reached = number(f.qsvc_deaths, 0), number(f.qsvc_reached, 0)
  if tokens > reached then return 0, tokens end
  if is_set(f.qsvc_alone) or deaths < crash_retries then deaths = deaths + 1 end
  return deaths, reached
end

-- What the worker holds, and the leases in one queue, each added by one command at the end.
local held, leases = {}, {}

local function start(id, jk, sent, f, wip, queue_index)
  local ex, attempt = ARGV[7 + #out], number(f.qsvc_attempt, 0) + 1
  local composite = id .. ':' .. ex
  local ek, executions = RQ .. ':execution:' .. composite, RQ .. ':executions:' .. id
  -- First: whatever comes of the rest, a job that has left its queue is put back when this ends.
  leases[#leases + 1] = lease_end
  leases[#leases + 1] = composite
  -- One that stock tools put back, or that was cancelled and retried, may still be at work
  -- somewhere: two must never hold one job.
  if attempt > 1 or is_set(f.worker_name) or is_set(f.started_at) then
    local holder = RQ .. ':worker:' .. (f.worker_name or '') .. ':executions'
    for _, earlier in ipairs(redis.call('ZRANGE', executions, 0, -1)) do
      end_execution(wip, holder, id, earlier)
    end
  end
  -- Only stock tools queue a line that its batch counts as ended.
  if f.qsvc_batch and f.ended_at then reopen_line(batch_key(f.qsvc_batch), f.qsvc_line or '') end
  redis.call('HSET', ek, 'created_at', now_text, 'last_heartbeat', now_text, 'worker_name', worker)
  redis.call('ZADD', executions, index_end, ex)
  held[#held + 1] = composite
  local set = {'status', 'started', 'started_at', iso, 'last_heartbeat', iso, 'worker_name',
    worker, 'qsvc_execution', ex, 'qsvc_attempt', tostring(attempt)}
  local function also(field, value)
    set[#set + 1] = field
    set[#set + 1] = tostring(value)
  end
  local deaths = f.qsvc_deaths or '0'
  local earlier = is_set(f.qsvc_execution) and f.qsvc_execution or f.qsvc_resume
  local elements = is_set(earlier) and take_over(id, earlier, ex) or {}
  if #elements > 0 then
    sent[#sent + 1] = 'qsvc_progress'
    sent[#sent + 1] = join(elements)
  end
  if is_set(f.qsvc_resume) then also('qsvc_resume', '') end
  if is_set(f.qsvc_execution) then
    local reached
    deaths, reached = charge_death(f, tokens_of(elements))
    also('qsvc_deaths', deaths)
    also('qsvc_reached', reached)
    also('qsvc_alone', '')
  end
  if f.qsvc_write then also('qsvc_write', 0) end
  -- Stock RQ tools fail an abandoned job that has no retries left. The budget is filled up at
  -- every claim: how often a job may lose its worker is ours to count.
  if not is_set(f.retries_left) or f.qsvc_auto_retry == '1' then
    also('retries_left', 2)
    also('enqueue_at_front_on_retry', 1)
    also('qsvc_auto_retry', 1)
  end
  -- A plain job's description is RQ's repr of its arguments: the prompt.
  if not f.qsvc_batch then also('description', 'qsvc request') end
  redis.call('HSET', jk, unpack(set))
  if is_set(f.ttl) or attempt > 1 then redis.call('PERSIST', jk) end
  for _, item in ipairs({'qsvc_attempt', tostring(attempt), 'qsvc_deaths', deaths}) do
    sent[#sent + 1] = item
  end
  out[#out + 1] = {id, queue_index, sent}
end

-- Whether a job had ended before it was put into the queue; its status is set right then. A stock
-- tool that saw it run, and was too slow to see its end, does that. One that a person asked to
-- run it again has taken it out of the registry first.
local function had_ended(id, jk, f, queue)
  if not is_set(f.qsvc_settled) then return false end
  for _, status in ipairs({'finished', 'failed', 'canceled'}) do
    if redis.call('ZSCORE', RQ .. ':' .. status .. ':' .. queue, id) then
      redis.call('HSET', jk, 'status', status)
      return true
    end
  end
  return false
end

-- Return the next id of a list. They are taken out as many at a time as the list gets turns for
-- certain, and are in `taken`, by their list, until it is their turn.
local function next_id(list, num_lists, taken)
  local ids = taken[list]
  if not ids or ids.at > #ids then
    ids = redis.call('LPOP', list, math.max(1, math.floor((n - #out) / num_lists))) or {}
    ids.at = 1
    taken[list] = ids
  end
  ids.at = ids.at + 1
  return ids[ids.at - 1]
end

-- Put ids that were taken out, and whose turn did not come, back to the front of their lists.
local function put_back(taken)
  for list, ids in pairs(taken) do
    for i = #ids, ids.at, -1 do redis.call('LPUSH', list, ids[i]) end
  end
end

-- Claim from the lanes of one queue in turn, beginning with the first of `order`; '-' is the queue
-- itself. Takes empty lanes out of `order`. Returns whose turn is next and the jobs of a newer format.
local function serve(main, wip, lanes, order, queue_index, taken)
  local queue = string.sub(main, #(RQ .. ':queue:') + 1)
  local newer, at, is_main_empty = {}, 1, false
  while #order > (is_main_empty and 1 or 0) and #out < n and looked < 2000 and #newer < 500 do
    local lane = order[at]
    local list = lane == '-' and main or main .. ':' .. lane
    local id = not (lane == '-' and is_main_empty) and next_id(list, #order, taken)
    if id then
      local jk = job_key(id)
      local flat = redis.pcall('HGETALL', jk)  -- an error is an empty list: no job
      local f, sent = {}, {}
      for i = 1, #flat, 2 do
        local field, value = flat[i], flat[i + 1]
        f[field] = value
        if not UNSENT[field] then sent[#sent + 1], sent[#sent + 2] = field, value end
      end
      if may_hold_trace_context(f.meta) then
        sent[#sent + 1], sent[#sent + 2] = 'meta', f.meta
      end
      local is_queued = f.status == 'queued' and not had_ended(id, jk, f, queue)
      if is_queued and number(f.qsvc_v, 1) > version then
        newer[#newer + 1] = {list = list, lane = lane, id = id}
      else
        looked = looked + 1
        if is_queued and not pcall(start, id, jk, sent, f, wip, queue_index) then
          -- Somebody put another type where the job's executions are listed.
          redis.call('DEL', RQ .. ':executions:' .. id)
          start(id, jk, sent, f, wip, queue_index)
        end
      end
    elseif lane ~= '-' then
      redis.call('LREM', lanes, 1, lane)
      redis.call('SREM', queues, list)
      table.remove(order, at)
      at = at - 1
    else
      is_main_empty = true
    end
    at = at < #order and at + 1 or 1
  end
  return at, newer
end

for q = 5, #KEYS, 3 do
  local main, wip, lanes = KEYS[q], KEYS[q + 1], KEYS[q + 2]
  local order = redis.call('LRANGE', lanes, 0, -1)
  local num_lanes = #order
  if num_lanes == 0 then order[1] = '-' end
  local taken = {}
  local is_well, at, newer = pcall(serve, main, wip, lanes, order, (q - 5) / 3, taken)
  put_back(taken)
  call_many('ZADD', wip, leases)
  if not is_well then error(at) end
  leases = {}
  if num_lanes > 0 and #order == 1 and order[1] == '-' then
    redis.call('DEL', lanes)  -- only the queue itself is left: it needs no turns
  elseif num_lanes > 0 then
    for _ = 2, at do redis.call('LMOVE', lanes, lanes, 'LEFT', 'RIGHT') end
  end
  for i = #newer, 1, -1 do
    local job = newer[i]
    redis.call('LPUSH', job.list, job.id)
    if job.lane ~= '-' then open_lane(queues, main, lanes, job.lane) end
  end
end
if #out > 0 then
  call_many('SADD', wex, held)
  redis.call('HSET', wkey, 'state', 'busy')
  redis.call('EXPIRE', wex, lease + 60)
end
return {out, looked}
