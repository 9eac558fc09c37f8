"""Replies of well-known models that call tools, the templates that tell how they are written, and what they mean.

`real` names the file of a model's own template among those that llama.cpp keeps in `models/templates`.
"""

from dataclasses import dataclass

from tests.models.text.tool_templates import (
    ARGUMENTS,
    DEEPSEEK,
    DEEPSEEK_CALLS,
    GLM_CALL,
    GLM_REPLY,
    HERMES,
    HERMES_CALL,
    HERMES_REPLY,
    HERMES_THINKING,
    KIMI,
    KIMI_CALL,
    KIMI_REPLY,
    LIST_CALL,
    LIST_REPLY,
    LLAMA,
    LLAMA_REPLY,
    LLAMA_TURN,
    MINIMAX_CALL,
    MISTRAL_TURN,
    NAME,
    SEARCH,
    TEXT,
    THINK,
    WEATHER,
    XML_CALL,
    XML_REPLY,
    Call,
    S,
    W,
    call,
    parameters,
    say,
    template,
)


@dataclass(frozen=True)
class Row:
    """A template, a reply behind its prompt, and what that means.

    ends: what ends replies. is_open: the prompt ends inside the reasoning.
    """

    source: str
    reply: str
    calls: tuple[Call, ...] = (WEATHER, SEARCH)
    content: str = ""
    reasoning: str = ""
    real: str = ""
    ends: tuple[str, ...] = ("<|im_end|>",)
    is_open: bool = False


ROWS = {
    "Qwen2.5": Row(HERMES, f"Let me see.\n{HERMES_REPLY}", content="Let me see.", real="Qwen-Qwen2.5-7B-Instruct"),
    "Qwen3": Row(
        HERMES_THINKING,
        f"<think>\nBoth.\n</think>\n\nSo.\n{HERMES_REPLY}",
        content="So.",
        reasoning="Both.",
        real="Qwen-Qwen3-0.6B",
    ),
    "Qwen3, called while it reasons": Row(
        HERMES_THINKING, f"<think>\nBoth.\n{HERMES_REPLY}", reasoning="Both.", real="Qwen-Qwen3-0.6B"
    ),
    "QwQ": Row(
        template(HERMES_CALL, between="\n", thought=THINK, prompt="<think>\n"),
        f"Both.\n</think>\n\n{HERMES_REPLY}",
        reasoning="Both.",
        real="Qwen-QwQ-32B",
        is_open=True,
    ),
    "Qwen3-Coder": Row(template(XML_CALL, between="\n"), f"So.\n{XML_REPLY}", content="So.", real="Qwen3-Coder"),
    "Qwen3-Coder without its first marker": Row(
        template(XML_CALL, between="\n"),
        "So.\n" + XML_REPLY.removeprefix("<tool_call>\n"),
        content="So.",
        real="Qwen3-Coder",
    ),
    "Qwen3.5": Row(
        template(XML_CALL, between="\n", thought=THINK, prompt="<think>\n"),
        f"Both.\n</think>\n\n{XML_REPLY}",
        reasoning="Both.",
        real="Qwen3.5-4B",
        is_open=True,
    ),
    "Hermes 2 Pro": Row(HERMES, HERMES_REPLY, real="NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"),
    "Hermes 3": Row(HERMES, HERMES_REPLY, real="NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    "MiMo": Row(HERMES, HERMES_REPLY, real="MiMo-VL"),
    "Llama 3.1": Row(LLAMA, LLAMA_REPLY, (WEATHER,), real="meta-llama-Llama-3.1-8B-Instruct", ends=("<|eot_id|>",)),
    "Llama 3.1 with the type": Row(
        LLAMA,
        '{"type": "function", ' + LLAMA_REPLY[1:],
        (WEATHER,),
        real="meta-llama-Llama-3.1-8B-Instruct",
        ends=("<|eot_id|>",),
    ),
    "Llama 3.2": Row(LLAMA, LLAMA_REPLY, (WEATHER,), real="meta-llama-Llama-3.2-3B-Instruct", ends=("<|eot_id|>",)),
    "Llama 3.3": Row(
        LLAMA,
        f"<|python_tag|>{LLAMA_REPLY}",
        (WEATHER,),
        real="meta-llama-Llama-3.3-70B-Instruct",
        ends=("<|eot_id|>",),
    ),
    "Llama 4": Row(
        template(
            call('{"name": "', '", "parameters": ', "}"),
            turn=("<|header_start|>", "<|header_end|>\n\n"),
            end="<|eot|>",
            only_one=True,
        ),
        LLAMA_REPLY,
        (WEATHER,),
        ends=("<|eot|>",),
    ),
    "Mistral v3": Row(
        template(LIST_CALL, opening="[TOOL_CALLS] [", between=", ", closing="]", turn=MISTRAL_TURN, end="</s>"),
        f"[TOOL_CALLS] {LIST_REPLY}",
        ends=("</s>",),
    ),
    "Mistral Nemo": Row(
        template(LIST_CALL, opening="[TOOL_CALLS][", between=", ", closing="]", turn=MISTRAL_TURN, end="</s>"),
        f"So. [TOOL_CALLS]{LIST_REPLY}",
        content="So.",
        real="mistralai-Mistral-Nemo-Instruct-2407",
        ends=("</s>",),
    ),
    "Mistral Small 3.2": Row(
        template(
            say("[TOOL_CALLS]") + NAME + say("[CALL_ID]") + "{{ c.id }}" + say("[ARGS]") + ARGUMENTS,
            turn=MISTRAL_TURN,
            end="</s>",
        ),
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdef001[ARGS]{W}[TOOL_CALLS]search[CALL_ID]abcdef002[ARGS]{S}",
        real="Mistral-Small-3.2-24B-Instruct-2506",
        ends=("</s>",),
    ),
    "Devstral": Row(
        template(call("[TOOL_CALLS]", "[ARGS]", ""), turn=MISTRAL_TURN, end="</s>"),
        f"So.[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]search[ARGS]{S}",
        content="So.",
        real="unsloth-mistral-Devstral-Small-2507",
        ends=("</s>",),
    ),
    "Ministral 3": Row(
        template(call("[TOOL_CALLS]", "[ARGS]", ""), turn=MISTRAL_TURN, end="</s>", thought=("[THINK]", "[/THINK]")),
        f"[THINK]Both.[/THINK][TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]search[ARGS]{S}",
        reasoning="Both.",
        real="mistralai-Ministral-3-14B-Reasoning-2512",
        ends=("</s>",),
    ),
    "DeepSeek R1": Row(
        template(
            call("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
            between="\n",
            prompt="<think>\n",
            thought=THINK,
            **DEEPSEEK_CALLS,
            **DEEPSEEK,
        ),
        "Both.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{W}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{S}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reasoning="Both.",
        real="llama-cpp-deepseek-r1",
        ends=("<｜end▁of▁sentence｜>",),
        is_open=True,
    ),
    "DeepSeek V3.1": Row(
        template(
            call("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", TEXT), **DEEPSEEK_CALLS, **DEEPSEEK
        ),
        f"So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{S}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="So.",
        real="deepseek-ai-DeepSeek-V3.1",
        ends=("<｜end▁of▁sentence｜>",),
    ),
    "DeepSeek V3.2": Row(
        template(
            say('<｜DSML｜invoke name="')
            + NAME
            + say('">\n')
            + "{% for k, v in c.function.arguments | items %}"
            + say('<｜DSML｜parameter name="')
            + "{{ k }}"
            + say('" string="')
            + "{{ 'true' if v is string else 'false' }}"
            + say('">')
            + "{{ v if v is string else v | tojson }}"
            + say("</｜DSML｜parameter>\n")
            + "{% endfor %}"
            + say("</｜DSML｜invoke>\n"),
            opening="<｜DSML｜function_calls>\n",
            closing="</｜DSML｜function_calls>",
            **DEEPSEEK,
        ),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">a <b></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        real="deepseek-ai-DeepSeek-V3.2",
        ends=("<｜end▁of▁sentence｜>",),
    ),
    "GLM-4.6": Row(
        template(
            GLM_CALL, between="\n", thought=("<think>", "</think>\n"), turn=("<|", "|>\n"), end="", prompt="<think>"
        ),
        f"Both.</think>\n{GLM_REPLY}",
        reasoning="Both.",
        real="GLM-4.6",
        ends=("<|user|>", "<|observation|>"),
        is_open=True,
    ),
    "GLM-4.7": Row(
        template(
            say("<tool_call>")
            + NAME
            + parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
            + say("</tool_call>"),
            turn=("<|", "|>"),
            end="",
        ),
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bonn</arg_value><arg_key>days</arg_key><arg_value>3"
        "</arg_value></tool_call><tool_call>search<arg_key>query</arg_key><arg_value>a <b></arg_value></tool_call>",
        real="GLM-4.7-Flash",
        ends=("<|user|>", "<|observation|>"),
    ),
    "Kimi K2": Row(KIMI, f"So.{KIMI_REPLY}", content="So.", real="Kimi-K2-Instruct"),
    "Kimi K2 without its first marker": Row(
        KIMI,
        KIMI_REPLY.removeprefix("<|tool_calls_section_begin|>").removesuffix("<|tool_calls_section_end|>"),
        real="Kimi-K2-Instruct",
    ),
    "Kimi K2 Thinking": Row(
        template(
            KIMI_CALL,
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
            turn=("<|im_", "<|im_middle|>"),
            thought=("<think>", "</think>"),
        ),
        f"<think>I call {KIMI_REPLY}",
        reasoning="I call",
        real="Kimi-K2-Thinking",
    ),
    "MiniMax M1": Row(
        template(call('{"name": "', '", "arguments": ', "}\n"), opening="<tool_calls>\n", closing="</tool_calls>"),
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {W}}}\n{{"name": "search", "arguments": {S}}}\n'
        "</tool_calls>",
        real="MiniMax-M1",
    ),
    "MiniMax M2": Row(
        template(
            MINIMAX_CALL,
            opening="<minimax:tool_call>\n",
            closing="</minimax:tool_call>",
            thought=THINK,
            prompt="<think>\n",
            end="[e~[",
        ),
        'Both.\n</think>\n\nSo.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bonn'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="search">\n'
        '<parameter name="query">a <b></parameter>\n</invoke>\n</minimax:tool_call>',
        content="So.",
        reasoning="Both.",
        real="MiniMax-M2",
        ends=("[e~[",),
        is_open=True,
    ),
    "Command R7B": Row(
        template(
            say('    {"tool_call_id": "') + "{{ loop.index0 }}" + call('", "tool_name": "', '", "parameters": ', "}"),
            opening="<|START_ACTION|>[\n",
            between=",\n",
            closing="\n]<|END_ACTION|>",
            thought=("<|START_THINKING|>", "<|END_THINKING|>"),
            end="<|END_OF_TURN_TOKEN|>",
        ),
        "<|START_THINKING|>Both.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {W}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "search", "parameters": {S}}}\n]<|END_ACTION|>',
        reasoning="Both.",
        real="CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        ends=("<|END_OF_TURN_TOKEN|>",),
    ),
    "gpt-oss": Row(
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary "
        "json<|message|>{{ c.function.arguments | tojson }}<|call|>{% else %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{W}",
        (WEATHER,),
        content="So.",
        reasoning="One.",
        real="openai-gpt-oss-120b",
        ends=("<|return|>", "<|call|>"),
    ),
    "Granite 3.3": Row(
        "{% if tools %}respond only with <|tool_call|> followed by a JSON list of tools used: {{ tools | tojson }}"
        "{% endif %}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        f"<|tool_call|>{LIST_REPLY}",
        real="ibm-granite-granite-3.3-2B-Instruct",
        ends=("<|end_of_text|>",),
    ),
    "Granite 4": Row(
        template(HERMES_CALL, between="\n", turn=("<|start_of_role|>", "<|end_of_role|>"), end="<|end_of_text|>"),
        HERMES_REPLY,
        real="ibm-granite-granite-4.0",
        ends=("<|end_of_text|>",),
    ),
    "Phi-4-mini": Row(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'system' and m.tools %}<|tool|>"
        "{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        f"<|tool_call|>{LIST_REPLY}<|/tool_call|>",
        ends=("<|end|>",),
    ),
    "Functionary 3.1": Row(
        template(call("<function=", ">", "</function>"), turn=LLAMA_TURN, end="<|eom_id|>"),
        f"So.<function=get_weather>{W}</function><function=search>{S}</function>",
        content="So.",
        real="meetkai-functionary-medium-v3.1",
        ends=("<|eot_id|>", "<|eom_id|>"),
    ),
    "FireFunction 2": Row(
        template(
            LIST_CALL,
            opening=" functools[",
            between=", ",
            closing="]",
            turn=LLAMA_TURN,
            end="<|eot_id|>",
            tools="{{ functions }}",
        ).replace("{% if tools %}", "{% if functions %}"),
        f"functools{LIST_REPLY}",
        real="fireworks-ai-llama-3-firefunction-v2",
        ends=("<|eot_id|>",),
    ),
    "Gemma 3": Row(
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        HERMES_REPLY,
        real="google-gemma-2-2b-it",
        ends=("<end_of_turn>",),
    ),
    "SmolLM3": Row(
        "{% if xml_tools %}<|im_start|>system\n<tools>{% for t in xml_tools %}{{ t | string }}{% endfor %}</tools>"
        "<|im_end|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        HERMES_REPLY,
    ),
    "xLAM 2": Row(
        template(LIST_CALL, opening="[", between=", ", closing="]", turn=LLAMA_TURN, end="<|eot_id|>"),
        LIST_REPLY,
        ends=("<|eot_id|>",),
    ),
    "Nemotron Nano 2": Row(
        template(
            LIST_CALL,
            opening="<TOOLCALL>[",
            between=", ",
            closing="]</TOOLCALL>",
            thought=THINK,
            end="<SPECIAL_12>",
        ),
        f"<think>\nBoth.\n</think>\n\n<TOOLCALL>{LIST_REPLY}</TOOLCALL>",
        reasoning="Both.",
        real="NVIDIA-Nemotron-Nano-v2",
        ends=("<SPECIAL_12>",),
    ),
    "Nemotron 3 Nano": Row(
        template(XML_CALL, between="\n", thought=THINK, prompt="<think>\n"),
        f"Both.\n</think>\n{XML_REPLY}",
        reasoning="Both.",
        real="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        is_open=True,
    ),
    "Apertus": Row(
        template(
            say('{"') + NAME + say('": ') + TEXT + say("}"),
            opening="<|tools_prefix|>[",
            between=", ",
            closing="]<|tools_suffix|>",
        ),
        f'So.<|tools_prefix|>[{{"get_weather": {W}}}, {{"search": {S}}}]<|tools_suffix|>',
        content="So.",
        real="Apertus-8B-Instruct",
    ),
    "Seed-OSS": Row(
        template(
            say("<seed:tool_call>\n<function=")
            + NAME
            + say(">\n")
            + parameters("<parameter=", ">", "</parameter>\n")
            + say("</function>\n</seed:tool_call>"),
            between="\n",
            thought=("<seed:think>", "</seed:think>\n"),
            turn=("<seed:bos>", "\n"),
            end="<seed:eos>",
        ),
        "<seed:think>Both.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Bonn</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=search>\n"
        "<parameter=query>a <b></parameter>\n</function>\n</seed:tool_call>",
        reasoning="Both.",
        real="ByteDance-Seed-OSS",
        ends=("<seed:eos>",),
    ),
    "Apriel 1.5": Row(
        template(
            LIST_CALL,
            opening="<tool_calls>[",
            between=", ",
            closing="]</tool_calls>",
            end="<|end|>",
            thought=("<thinking>", "</thinking>"),
        ),
        f"<thinking>Both.</thinking>\n<tool_calls>{LIST_REPLY}</tool_calls>",
        reasoning="Both.",
        real="unsloth-Apriel-1.5",
        ends=("<|end|>",),
    ),
    "LFM2": Row(
        "{% if tools %}<|im_start|>system\nList of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>"
        "<|im_end|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        'So.<|tool_call_start|>[get_weather(city="Bonn", days=3), search(query="a <b>")]<|tool_call_end|>',
        content="So.",
        real="LFM2-8B-A1B",
    ),
    "Hunyuan A13B": Row(
        template(
            LIST_CALL, opening="<tool_calls>[", between=", ", closing="]</tool_calls>", end="<|eos|>", thought=THINK
        ),
        f"<think>\nBoth.\n</think>\n<tool_calls>{LIST_REPLY}</tool_calls>",
        reasoning="Both.",
        ends=("<|eos|>",),
    ),
    "Gemma 4": Row(
        template(
            say("<|tool_call>call:")
            + NAME
            + say("{")
            + "{% for k, v in c.function.arguments | dictsort %}{{ k }}:{% if v is string %}"
            + say('<|"|>')
            + "{{ v }}"
            + say('<|"|>')
            + "{% elif v is mapping %}{{ '{' }}{% for a, b in v | dictsort %}{{ a }}:{% if b is string %}"
            + say('<|"|>')
            + "{{ b }}"
            + say('<|"|>')
            + "{% else %}{{ b | tojson }}{% endif %}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
            + "{% else %}{{ v | tojson }}{% endif %}{{ ',' if not loop.last }}{% endfor %}"
            + say("}<tool_call|>"),
            thought=("<|channel>thought\n", "\n<channel|>"),
            turn=("<|turn>", "\n"),
            end="<turn|>\n",
        ),
        '<|channel>thought\nBoth.\n<channel|><|tool_call>call:get_weather{city:<|"|>Bonn<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:search{query:<|"|>a <b><|"|>}<tool_call|>',
        reasoning="Both.",
        real="google-gemma-4-31B-it",
        ends=("<turn|>", "<|tool_response>"),
    ),
}
