-- GIVE_UP: begin to end a batch before all of its lines have: nothing is added to it any more.
-- KEYS 1 qsvc:batch:<id>
-- ARGV 1 the status it is to end with (cancelled, expired)  2 seconds since the epoch
-- Returns 1, or 0 when the batch is gone or has ended.
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'in_progress' and status ~= 'cancelling' then return 0 end
-- Needs no memory. A full server refuses a script's first write only, and a delete, which makes
-- room, begins here. In cancel.lua too.
redis.call('PERSIST', KEYS[1])
redis.call('HSET', KEYS[1], 'status', 'cancelling', 'ending', ARGV[1], 'submitted', '1',
  'cancelling_at', ARGV[2])
return 1
