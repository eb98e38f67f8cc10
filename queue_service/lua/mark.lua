-- MARK: set one field of a job that is still there; a deleted one must not come back as a husk.
-- KEYS 1 rq:job:<id>
-- ARGV 1 field  2 value
-- Returns 1 if the job is there, else 0.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
