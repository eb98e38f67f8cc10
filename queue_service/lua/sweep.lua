-- SWEEP: square a batch with lines that stock RQ tools cancelled, failed, deleted or emptied.
-- KEYS 1 qsvc:batch:<id>
-- ARGV 1 batch id  2 error (JSON without its last brace) for a job that is gone
--      then pairs: line number, custom id as JSON
-- Reads also rq:job:<id>. Writes also the batch's other keys.
-- Returns how many lines were counted as ended.
local batch, squared = KEYS[1], 0
local ENDINGS = {canceled = 'cancelled', failed = 'failed', stopped = 'failed',
  finished = 'completed'}
for i = 3, #ARGV, 2 do
  local line = ARGV[i]
  local id = ARGV[1] .. '-' .. line
  local status = redis.call('HGET', job_key(id), 'status')
  local outcome = ENDINGS[status]
  if not status then outcome = 'failed' end
  if outcome and settle_line(batch, line, outcome) then
    squared = squared + 1
    if not status then
      local text = ARGV[2] .. ',"line":' .. line .. ',"custom_id":' .. ARGV[i + 1] .. '}'
      keep_error(batch, line, text)
    end
  end
end
close_batch(batch)
return squared
