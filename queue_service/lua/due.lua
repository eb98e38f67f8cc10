-- DUE: take the members of a sorted set whose time has come, and put them off.
-- KEYS 1 the set (qsvc:aftercare:<q>)
-- ARGV 1 seconds until they are due again
-- Returns them.
local now = redis_now()
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 100)
for _, member in ipairs(due) do
  redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[1]), member)
end
return due
