-- BURY: hand back at once everything that a dead worker held, and sign it off.
-- KEYS 1 rq:worker:<w>  2 rq:worker:<w>:executions  3 rq:workers  4 qsvc:worker:<w>
-- ARGV none, or 1 '1': it is known which executions had begun  then those
-- Writes also rq:job:<id>, rq:queue:<q>, rq:wip:<q>, rq:execution:<id>:<ex>,
-- rq:executions:<id>, rq:workers:<q>.
-- The jobs keep the name of the execution they lost: the next claim charges the death. Not those
-- whose execution had not begun.
-- Returns the ids that were put back.
local wkey, wex, workers, card = unpack(KEYS)
local back, begun = {}, {}
for i = 2, #ARGV do begun[ARGV[i]] = true end
for _, composite in ipairs(redis.call('SMEMBERS', wex)) do
  local id, ex = string.match(composite, '^(.*):(.*)$')
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'origin', 'qsvc_execution')
  if is_set(f[2]) then
    local held = end_execution(RQ .. ':wip:' .. f[2], wex, id, ex)
    if held == 1 and f[1] == 'started' and f[3] == ex then
      if ARGV[1] == '1' and not begun[ex] then
        redis.call('HDEL', jk, 'qsvc_execution', 'qsvc_alone')
        -- What it would have gone on with is left to the next one.
        if redis.call('EXISTS', 'qsvc:progress:' .. id .. ':' .. ex) == 1 then
          redis.call('HSET', jk, 'qsvc_resume', ex)
        end
      end
      redis.call('HSET', jk, 'status', 'queued', 'started_at', '', 'worker_name', '')
      back[#back + 1] = {RQ .. ':queue:' .. f[2], id}
    end
  end
end
-- Line order inside a batch: ids are put back highest first, so that the lowest is in front.
table.sort(back, function(a, b)
  if #a[2] ~= #b[2] then return #a[2] > #b[2] end
  return a[2] > b[2]
end)
local ids = {}
for i, job in ipairs(back) do
  redis.call('LPUSH', job[1], job[2])
  ids[i] = job[2]
end
for queue in string.gmatch(redis.call('HGET', wkey, 'queues') or '', '[^,]+') do
  redis.call('SREM', RQ .. ':workers:' .. queue, wkey)
end
redis.call('SREM', workers, wkey)
redis.call('DEL', wkey, wex, card)
return ids
