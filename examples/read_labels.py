"""Reads the answers in labels.out.jsonl and counts the opinions."""

import json
from collections import Counter

opinions: Counter[str] = Counter()
with open("labels.out.jsonl", encoding="utf-8") as file:
    for line in map(json.loads, file):
        if line["error"]:
            print(f"{line['custom_id']}: {line['error']['message']}")
            continue
        [choice] = line["response"]["body"]["choices"]
        if choice["finish_reason"] == "length":
            print(f"{line['custom_id']}: cut off, give it more tokens")
            continue
        label = json.loads(choice["message"]["content"])
        opinions[label["opinion"]] += 1
print(f"{opinions.total()} labels: {sorted(opinions)}")
