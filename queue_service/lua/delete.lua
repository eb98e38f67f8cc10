-- DELETE: delete jobs with all that belongs to them, also what still runs.
-- KEYS none
-- ARGV 1 queue  2.. job ids
-- Deletes rq:job:<id>, rq:results:<id>, rq:executions:<id>, rq:execution:<id>:<ex>,
-- qsvc:stream:<id>, qsvc:progress:<id>:<ex>; takes them out of rq:wip:<q> and the registries.
for i = 2, #ARGV do delete_job(ARGV[i], ARGV[1]) end
return #ARGV - 1
