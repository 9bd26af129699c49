# Letters of other alphabets than ours.
"""First words of requests, which the target goes on with as if it were the user.

What it invents after them is far more varied than anything put together from our words, and the
first words see to it that every kind of request occurs.
"""

import random

_OPENERS = {
    "chat": "I've been thinking about|Can you help me write|Give me some ideas for|Write an email to|Write a short story about|I'm planning a|Tell me about|What do you think of|How can I improve my|I feel|Write a poem about|My boss|Suggest|Imagine you are|Draft a|Explain to a child|What should I|I need advice on|Write a product description for|Make a list of|Compare|Give me tips for|Pretend|Recommend a",
    "code": "Write a Python function that|Write a function that|Implement|How do I write a|Write a SQL query that|Write a bash script that|Create a class|Using React,|Write a regular expression that|Given an array of|In JavaScript,|In C++,|Write a Rust|Write a Go|Create an HTML page|Write a unit test for|I'm getting this error:|Write a Dockerfile|def|Complete this function:\n```python\ndef|Write a program in Java|Write a TypeScript|Using pandas,|Write an API endpoint|class|import ",
    "maths": "Solve|Calculate|Find the|A store sells|If a|What is the probability|A train|John has|Maria|How many|Prove that|Let f(x) =|The sum of|A farmer|What is the value of|Simplify|Each|A rectangle",
    "reasoning": "There are three|If all|Think step by step:|A man|Which of the following|Five people|Who is|What is the next number|Suppose|Is the following argument valid?|You have|Alice, Bob and|In a race|Sort these|Logic puzzle:",
    "questions": "What is|Who was|When did|Why do|Why is|How does|Where is|What are the main|What happened|Which country|Is it true that|What is the difference between|How long|What does|Who invented|Name the|How do I|What causes|Can you explain|Define",
    "retrieval": "Here is a list of|Given the following table|Based on the text below,|From the following|Extract|Read the passage and answer:|Find all|Here is the log:\n|Context:\n|Use only this information:|According to the|Document:\n|The following is a",
    "summaries": "Summarize the following|Summarize this article:|TL;DR of this:|Give me the key points of|Shorten this|Summarise in one sentence:|Here is an email thread.|Meeting notes:|Rewrite this paragraph|What is the main point of|Make bullet points from|The company announced",
    "translation": "Translate to French:|Translate into Spanish:|Translate the following into German:|Translate this to English:|How do you say|Translate from English to Chinese:|Please translate|Translate to Italian:|What does the German word|Translate into Portuguese:|Translate to Russian:|Translate to Japanese:|翻译成英文:|Translate this sentence|Übersetze|Traduis",
    "edits": "Fix the bug in this code:\n```python\n|Refactor this code:\n```python\n|```python\n|```javascript\n|Add type hints to:\n```python\n|Rename|Change this function so that|Here is my code:\n```python\n|Here is my code:\n```java\n|Add error handling to this:\n```|Here is a file:\n```|Convert this code to|Improve this text:|Correct the grammar:|Optimize this query:\n```sql\n|Here's my config:\n```yaml\n|```typescript\n|```cpp\n|```html\n|Add a docstring to\n```python\n|Update this JSON:\n```json\n|Replace",
    "languages": "请|如何|写一个|什么是|为什么|解释|帮我|用Python|给出|Erkläre|Wie kann ich|Schreibe|Was ist|Warum|Explique|Comment|Écris|Qu'est-ce que|Pourquoi|Explica|Cómo|Escribe|Qué es|Напиши|Как|Что такое|Почему|について|日本語で|どうやって|Spiega|Scrivi|Escreva",
}  # fmt: skip
SHARES = {
    "chat": 0.14, "code": 0.14, "maths": 0.08, "reasoning": 0.09, "questions": 0.14, "retrieval": 0.07,
    "summaries": 0.09, "translation": 0.12, "edits": 0.08, "languages": 0.05,
}  # fmt: skip


def opener(r: random.Random) -> tuple[str, str]:
    """The first words of a request, and its kind."""
    kind = r.choices(list(SHARES), list(SHARES.values()))[0]
    return r.choice(_OPENERS[kind].split("|")), kind
