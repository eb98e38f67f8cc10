-- RELEASE: forget an execution that was taken from its worker; the job stays as it is.
-- KEYS 1 rq:wip:<q>  2 rq:worker:<w>:executions
-- ARGV 1 job id  2 execution id
-- Drops rq:execution:<id>:<ex>, its place in rq:executions:<id>, qsvc:progress:<id>:<ex>.
redis.call('DEL', 'qsvc:progress:' .. ARGV[1] .. ':' .. ARGV[2])
return end_execution(KEYS[1], KEYS[2], ARGV[1], ARGV[2])
