"""Writes questions.jsonl: requests that begin alike, with what differs at the end."""

import json

RULES = """You answer questions of customers of a shop for garden tools.
Answer in one short sentence, in plain words, and never promise a date.
A spade costs 25 euros, a rake 18 euros, a hoe 16 euros, and a pair of shears 32 euros.
Delivery takes two to five working days and costs 4 euros; from 50 euros on it is free.
Tools may be sent back within thirty days, in any state but broken by force.
A tool that breaks within ten years of its sale is repaired or replaced for nothing.
Spare handles are sold for every tool, of ash wood, in three lengths.
If a question is about something else, say that you do not know and name the telephone number."""
QUESTIONS = [
    "What does a rake cost?",
    "How long does delivery take?",
    "My spade broke after nine years. What now?",
    "Do you sell handles?",
]

with open("questions.jsonl", "w", encoding="utf-8") as file:
    for question in QUESTIONS:
        messages = [
            {"role": "system", "content": RULES},
            {"role": "user", "content": question},
        ]
        body = {"messages": messages, "temperature": 0, "max_tokens": 4}
        file.write(json.dumps(body) + "\n")
