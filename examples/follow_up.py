"""Asks a model, and has a job of the application follow the answer."""

import os

from redis import Redis
from rq import Queue, Retry

connection = Redis.from_url(os.environ["QSVC_REDIS_URL"])
models = Queue("qsvc:default", connection=connection, serializer="json")
reports = Queue("reports", connection=connection, serializer="json")

question = {"role": "user", "content": "Name three fruits."}
asked = models.enqueue(
    "queue_service.tasks.chat",
    {"messages": [question], "temperature": 0, "max_tokens": 24},
    job_timeout=600,
    retry=Retry(max=3, interval=[10, 60, 300]),
    result_ttl=86_400,
)
reports.enqueue("reports.keep", "report.txt", depends_on=asked)
