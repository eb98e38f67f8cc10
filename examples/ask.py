"""Asks a model with plain RQ; nothing of qsvc is imported."""

import os

from redis import Redis
from rq import Queue

connection = Redis.from_url(os.environ["QSVC_REDIS_URL"])
queue = Queue("qsvc:default", connection=connection, serializer="json")

question = {"role": "user", "content": "Name three fruits."}
body = {"messages": [question], "temperature": 0, "max_tokens": 24}
job = queue.enqueue("queue_service.tasks.chat", body)

result = job.latest_result(timeout=120)
if result is None:
    raise SystemExit(f"{job.id} has no answer yet; does a worker run?")
if result.type is not result.Type.SUCCESSFUL:
    raise SystemExit(f"{job.id} failed: {result.exc_string}")
print(result.return_value["choices"][0]["message"]["content"])
