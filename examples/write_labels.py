"""Writes labels.jsonl: one request for each review, and what every answer has to look like."""

import json

REVIEWS = [
    "The blender broke after two days and nobody answers my emails.",
    "Exactly what I was looking for, and a fair price.",
    "The delivery was late, but the lamp is beautiful.",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "opinion": {"enum": ["good", "bad", "mixed"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["opinion", "stars"],
    "additionalProperties": False,
}
TASK = "Read the review. Say what the writer thinks and how many stars they would give."

with open("labels.jsonl", "w", encoding="utf-8") as file:
    for number, review in enumerate(REVIEWS, 1):
        body = {
            "messages": [
                {"role": "system", "content": TASK},
                {"role": "user", "content": review},
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "label", "schema": SCHEMA},
            },
            "temperature": 0,
            "max_tokens": 64,
        }
        line = {"custom_id": f"review-{number}", "method": "POST"}
        line |= {"url": "/v1/chat/completions", "body": body}
        file.write(json.dumps(line) + "\n")
