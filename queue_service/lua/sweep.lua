-- SWEEP: square a batch with lines that stock RQ tools cancelled, failed, deleted or emptied.
-- KEYS 1 qsvc:batch:<id>  2 qsvc:batch:<id>:errors  3 qsvc:batch:<id>:done
-- ARGV 1 batch id  2 error (JSON without its last brace) for a job that is gone
--      then pairs: line number, custom id as JSON
-- Writes also rq:job:<id>.
-- Returns how many lines were counted as ended.
local batch, errors, done = unpack(KEYS)
local squared = 0
local OUTCOMES = {canceled = 'cancelled', failed = 'failed', stopped = 'failed',
  finished = 'completed'}
for i = 3, #ARGV, 2 do
  local line = ARGV[i]
  local id = ARGV[1] .. '-' .. line
  local f = redis.call('HMGET', job_key(id), 'status', 'qsvc_settled')
  if not f[1] then
    local text = ARGV[2] .. ',"line":' .. line .. ',"custom_id":' .. ARGV[i + 1] .. '}'
    if redis.call('HSETNX', errors, line, text) == 1 then
      redis.call('HINCRBY', batch, 'failed', 1)
      redis.call('XADD', done, '*', 'l', line, 's', 'failed')
      squared = squared + 1
    end
  elseif OUTCOMES[f[1]] and not f[2] then
    settle_line(id, OUTCOMES[f[1]])
    squared = squared + 1
  end
end
close_batch(batch)
return squared
