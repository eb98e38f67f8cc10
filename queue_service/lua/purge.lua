-- PURGE: delete failed jobs; a batch keeps the error of its line.
-- KEYS none
-- ARGV pairs: job id, error (JSON)
-- Writes rq:failed:<q>, the batch's keys; deletes rq:job:<id> and what belongs to it.
-- Returns how many were deleted: those that had failed and were not queued again meanwhile.
local n = 0
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local jk = job_key(id)
  local f = redis.call('HMGET', jk, 'status', 'origin', 'qsvc_batch', 'qsvc_line')
  if f[1] == 'failed' or f[1] == 'stopped' then
    if is_set(f[3]) and redis.call('EXISTS', batch_key(f[3])) == 1 then
      keep_error(batch_key(f[3]), f[4], ARGV[i + 1])
      settle_line(batch_key(f[3]), f[4], 'failed')  -- when a stock tool failed it
    end
    delete_job(id, f[2] or '')
    n = n + 1
  end
end
return n
