-- ENQUEUE: add one chunk of a batch's lines to its lane. Run again with the same lines it adds
-- nothing: the batch's cursor says which line was the last one added. A chunk that does not follow
-- it is refused, since the one before was lost on the way or with a server that crashed.
-- KEYS 1 rq:queues  2 rq:queue:<q>  3 rq:queue:<q>:<batch> (the lane)  4 qsvc:lanes:<q>
--      5 qsvc:batch:<id>  6 qsvc:batch:<id>:lines  7 qsvc:batch:<id>:errors
-- ARGV 1 batch id  2 queue name  3 iso time  4 description  5 format version  6 stream flag
--      7 last line of the chunk  8 '1' when it is the last chunk  9 the last line before the chunk
--      10 '1' when the lines are to be traced
--      then per line: number, custom id, meta (JSON), job data (zlib) or '', error (JSON) or '',
--      what its prompt shares with other lines (qsvc_prefix) or ''
-- Writes also rq:job:<batch>-<line>, qsvc:batch:<id>:done, qsvc:batch:<id>:outcomes.
-- Returns the batch's status and how many of its lines have not ended; nothing is added unless
-- the status is in_progress. Returns 'gap' and 0 when lines before the chunk are missing.
local queues, main, lane, lanes, batch, lines, errors = unpack(KEYS)
local b = redis.call('HMGET', batch, 'status', 'cursor', 'submitted')
if b[1] ~= 'in_progress' or b[3] == '1' then return {b[1] or 'deleted', 0} end
local cursor = tonumber(b[2] or 0)
if cursor < tonumber(ARGV[9]) then return {'gap', 0} end
local total, failed = 0, 0
local listed, queued = {}, {}
for i = 11, #ARGV, 6 do
  local line, custom_id, meta, data, err, prefix = unpack(ARGV, i, i + 5)
  if tonumber(line) > cursor then
    total = total + 1
    listed[total] = line .. ' ' .. custom_id
    if err == '' then
      local id = ARGV[1] .. '-' .. line
      redis.call('HSET', job_key(id), 'status', 'queued', 'created_at', ARGV[3],
        'enqueued_at', ARGV[3], 'origin', ARGV[2], 'description', ARGV[4], 'data', data,
        'meta', meta, 'timeout', '-1', 'qsvc_v', ARGV[5], 'qsvc_batch', ARGV[1],
        'qsvc_line', line, 'qsvc_stream', ARGV[6])
      if ARGV[10] == '1' then redis.call('HSET', job_key(id), 'qsvc_trace', '1') end
      if prefix ~= '' then redis.call('HSET', job_key(id), 'qsvc_prefix', prefix) end
      queued[#queued + 1] = id
    else
      failed = failed + 1
      redis.call('HSET', errors, line, err)
      note_outcome(batch, line, 'failed')
    end
  end
end
call_many('RPUSH', lines, listed)
call_many('RPUSH', lane, queued)
if #queued > 0 then open_lane(queues, main, lanes, ARGV[1]) end
redis.call('HINCRBY', batch, 'total', total)
if failed > 0 then redis.call('HINCRBY', batch, 'failed', failed) end
if tonumber(ARGV[7]) > cursor then redis.call('HSET', batch, 'cursor', ARGV[7]) end
if ARGV[8] == '1' then
  redis.call('HSET', batch, 'submitted', '1')
  close_batch(batch)
end
local now = redis.call('HMGET', batch, 'status', 'total', 'completed', 'failed', 'cancelled')
local ended = tonumber(now[3] or 0) + tonumber(now[4] or 0) + tonumber(now[5] or 0)
return {now[1], tonumber(now[2] or 0) - ended}
