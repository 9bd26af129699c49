"""Chat templates of model families, reduced to how they treat turns, tools and thoughts.

Each refuses, moves, and leaves out what the family's real template does.
"""

SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Knows no tools; takes any role anywhere."""

_HERMES = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}

# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Return a json object within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first)
    or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"""

QWEN2_5 = _HERMES + "{%- endif %}"
"""Calls in JSON, several at once; results within the user's turn."""

QWEN3 = _HERMES + (
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{%- endif %}"
)
"""The same for a model that thinks unless it is told not to."""

QWQ = _HERMES + "{{ '<think>\n' }}{%- endif %}{% if false %}</think>{% endif %}"
"""The same for a model whose prompts end within a thought, whatever is asked."""

LLAMA3 = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}{{ system + '<|eot_id|>' }}
{%- if tools and not messages %}
{{- raise_exception("Cannot put tools in the first user message when there is none!") }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'ipython' or m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' }}
{{- m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}Given these functions, respond with a JSON for a function call.
Respond in the format {"name": function name, "parameters": dictionary of argument name and value}.
{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{{- m.content + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
"""One call at once, as bare JSON; what is said with a call is left out; results by ipython."""

MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
{%- set users = namespace(last='') %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}{% set users.last = loop.index0 %}{% endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}<s>
{%- for m in loop_messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == users.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' }}
{%- if loop.index0 == users.last and system is defined %}{{ system + '\n\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}{{ ']</s>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' }}
{{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception("Only user and assistant roles are supported!") }}{% endif %}
{%- endfor %}"""
"""Wants alternation and ids of nine characters; leaves out what is said with a call."""

DEVSTRAL = """
{%- if messages[0].role == 'system' %}{{ '[SYSTEM_PROMPT]' + messages[0].content }}
{{- '[/SYSTEM_PROMPT]' }}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception("conversation roles must alternate user and assistant roles") }}
{%- endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}
{%- if not m.content and not m.tool_calls %}
{{- raise_exception("Assistant message must have content or tool calls") }}{% endif %}
{{- m.content }}{% for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{ '</s>' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception("Only user, assistant and tool roles are supported") }}{% endif %}
{%- endfor %}"""
"""Newer Mistral models: the same order, no ids, no empty turns of the assistant's."""

GEMMA2 = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""Knows neither instructions nor tools, and wants alternation."""

GEMMA3 = """
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}
{%- set loop_messages = messages[1:] %}
{%- else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}
{%- for m in loop_messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + (first if loop.first else '') + m.content | trim }}
{{- '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""The same, with instructions at the beginning of the user's first turn."""

DEEPSEEK_R1 = """
{%- set ns = namespace(system='', outputs=false) %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}
{%- endfor %}{{ '<begin>' + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.outputs = false %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}
{%- for call in m.tool_calls %}{{ '<|call|>' + call.function.name }}
{{- call.function.arguments | tojson }}{% endfor %}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}
{{- '<|Assistant|>' + content + '<end>' }}
{%- elif m.role == 'tool' %}{{ '<|output|>' + m.content }}{% set ns.outputs = true %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
"""Opens a thought; shows the last instructions only, and calls only of turns without content."""

GPT_OSS = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ['system', 'developer'] %}{% set instructions = messages[0].content %}
{%- set loop_messages = messages[1:] %}
{%- else %}{% set instructions = '' %}{% set loop_messages = messages %}{% endif %}
{%- if instructions or tools %}{{ '<|start|>developer<|message|>' + instructions }}
{%- for tool in tools or [] %}{{ '\ntype ' + tool.function.name + ' = (_: any) => any;' }}
{%- endfor %}{{ '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in loop_messages %}
{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}
{%- if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- else %}{% set last.name = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}
{{- raise_exception("Message has tool role, but there was no previous assistant message") }}
{%- endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{ '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""Channels; one call at once; late instructions are left out; results follow a call only."""

FAMILIES = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3,
    "qwq": QWQ,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "devstral": DEVSTRAL,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "deepseek-r1": DEEPSEEK_R1,
    "gpt-oss": GPT_OSS,
}
