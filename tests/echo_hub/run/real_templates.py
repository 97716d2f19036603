"""Facts about the chat templates that llama.cpp collects in `models/templates`, for test_chat_template_real.

The facts were read from each template as transformers renders it, not as Echo does. The stop tokens are those of the
published models. Templates are named by their files, and no template is part of this repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

IM: Final = ("<|im_end|>",)
DEEPSEEK: Final = ("<｜end▁of▁sentence｜>",)
LLAMA: Final = ("<|eot_id|>", "<|eom_id|>")
COHERE: Final = ("<|END_OF_TURN_TOKEN|>",)
GLM: Final = ("<|endoftext|>", "<|user|>", "<|observation|>")


@dataclass(frozen=True)
class Facts:
    stops: tuple[str, ...]
    """Tokens that end a reply or a tool call."""
    header: str = ""
    """The last characters of a prompt with one user turn, after the user's text."""
    ends: str | None = None
    """Text that the template writes at the end of a reply, up to a stop token. None: the template writes only the first
    stop token."""
    thinking: tuple[str, Any, Any] | None = None
    """Option of the template for reasoning: name, value for reasoning, and value for no or less reasoning."""
    on: str | None = None
    """Header if reasoning is turned on. None: the same as without the option."""
    off: str | None = None
    """Header if reasoning is turned off. None: the same as without the option."""
    alone: str = ""
    """Part of the error text if the template cannot be rendered without tools."""
    system: str = ""
    """Part of the error text if the template refuses a system turn."""
    tools: str = ""
    """Part of the error text if the template takes no tools."""


FACTS: Final[Mapping[str, Facts]] = {
    "Apertus-8B-Instruct": Facts(
        ("<|assistant_end|>",), header="<|user_end|><|assistant_start|>", thinking=("enable_thinking", True, False)
    ),
    "Apriel-1.6-15b-Thinker-fixed": Facts(
        ("<|end|>",), header="\n<|begin_assistant|>\nHere are my reasoning steps:\n", ends="\n<|end|>"
    ),
    "Bielik-11B-v3.0-Instruct": Facts(
        IM,
        header="<|im_end|>\n<|im_start|>assistant\n",
        thinking=("enable_thinking", True, False),
        on="<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "ByteDance-Seed-OSS": Facts(
        ("<seed:eos>",),
        header="<seed:eos><seed:bos>assistant\n",
        thinking=("thinking_budget", 512, 0),
        off="</seed:cot_budget_reflect>\n</seed:think>",
    ),
    "Cohere2MoE": Facts(
        COHERE,
        header="<|END_TEXT|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
        ends="<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        thinking=("reasoning_effort", "high", "none"),
        off="<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
    ),
    "CohereForAI-c4ai-command-r-plus-tool_use": Facts(
        COHERE,
        alone="'NoneType' object is not iterable",
        header="<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Facts(
        COHERE,
        header="<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
        ends="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        thinking=("enable_thinking", True, False),
        on="<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "GLM-4.6": Facts(
        GLM,
        header="<|assistant|>",
        ends="<|user|>",
        thinking=("enable_thinking", True, False),
        off="/nothink<|assistant|>\n<think></think>",
    ),
    "GLM-4.7-Flash": Facts(
        GLM,
        header="<|assistant|><think>",
        ends="<|user|>",
        thinking=("enable_thinking", True, False),
        off="<|assistant|></think>",
    ),
    "GigaChat3-10B-A1.8B": Facts(("<|message_sep|>",), header="<|message_sep|>\n\nassistant<|role_sep|>\n"),
    "GigaChat3.1-10B-A1.8B": Facts(("<|message_sep|>",), header="<|message_sep|>\n\nassistant<|role_sep|>\n"),
    "HuggingFaceTB-SmolLM3-3B": Facts(
        IM,
        header="<|im_end|>\n<|im_start|>assistant\n",
        thinking=("enable_thinking", True, False),
        off="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
        tools="does not show tools",
    ),
    "Kimi-K2-Instruct": Facts(IM, header="<|im_end|><|im_assistant|>assistant<|im_middle|>"),
    "Kimi-K2-Thinking": Facts(IM, header="<|im_end|><|im_assistant|>assistant<|im_middle|>"),
    "Kimi-K3": Facts(
        ("<|end_of_msg|>",),
        header='<|close|>message<|sep|><|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        ends="<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
        thinking=("thinking", True, False),
        off='<|close|>message<|sep|><|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
    ),
    "LFM2-8B-A1B": Facts(IM, header="<|im_end|>\n<|im_start|>assistant\n"),
    "LFM2.5-8B-A1B": Facts(IM, header="<|im_end|>\n<|im_start|>assistant\n"),
    "LFM2.5-Instruct": Facts(IM, header="<|im_end|>\n<|im_start|>assistant\n"),
    "MiMo-VL": Facts(IM, header="<|im_end|>\n<|im_start|>assistant\n"),
    "MiniMax-M1": Facts(("<end_of_sentence>",), header="<end_of_sentence>\n<beginning_of_sentence>ai name=assistant\n"),
    "MiniMax-M2": Facts(("[e~[",), header="[e~[\n]~b]ai\n<think>\n"),
    "MiniMax-M3": Facts(
        ("[e~[",),
        header="[e~[\n]~b]ai\n",
        thinking=("thinking_mode", "enabled", "disabled"),
        on="[e~[\n]~b]ai\n<mm:think>",
        off="[e~[\n]~b]ai\n</mm:think>",
    ),
    "Mistral-Small-3.2-24B-Instruct-2506": Facts(("</s>",), header="[/INST]"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Facts(
        IM,
        header="<|im_end|>\n<|im_start|>assistant\n<think>\n",
        thinking=("enable_thinking", True, False),
        off="<|im_end|>\n<|im_start|>assistant\n<think></think>",
    ),
    "NVIDIA-Nemotron-Nano-v2": Facts(
        ("<SPECIAL_12>",), header="\n<SPECIAL_11>Assistant\n<think>\n", ends="\n<SPECIAL_12>"
    ),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Facts(
        IM, alone="'NoneType' object is not iterable", header="<|im_end|>\n<|im_start|>assistant\n"
    ),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Facts(
        IM, alone="'NoneType' object is not iterable", header="<|im_end|>\n<|im_start|>assistant\n"
    ),
    "Qwen-QwQ-32B": Facts(
        IM,
        header="<|im_end|>\n<|im_start|>assistant\n<think>\n</think>",
        thinking=("enable_thinking", True, False),
        on="<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "Qwen-Qwen2.5-7B-Instruct": Facts(IM, header="<|im_end|>\n<|im_start|>assistant\n"),
    "Qwen-Qwen3-0.6B": Facts(
        IM,
        header="<|im_end|>\n<|im_start|>assistant\n",
        thinking=("enable_thinking", True, False),
        off="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "Qwen3-Coder": Facts(IM, header="<|im_end|>\n<|im_start|>assistant\n"),
    "Qwen3.5-4B": Facts(
        IM,
        header="<|im_end|>\n<|im_start|>assistant\n<think>\n",
        thinking=("enable_thinking", True, False),
        off="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "Reka-Edge": Facts(
        ("<sep>",),
        header="<sep>assistant:",
        ends="\n\n<sep>",
        thinking=("enable_thinking", True, False),
        on="<sep>assistant: <think>\n",
    ),
    "Spark2.5": Facts(
        DEEPSEEK,
        header="<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|Bot|><think>",
        thinking=("enable_thinking", True, False),
        off="<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|Bot|></think>",
    ),
    "StepFun3.5-Flash": Facts(IM, header="<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Facts(
        DEEPSEEK, header="<｜Assistant｜><think>\n", tools="does not show tools"
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Facts(
        DEEPSEEK,
        header="<｜Assistant｜><think>\n</think>",
        thinking=("enable_thinking", True, False),
        on="<｜Assistant｜><think>\n",
        tools="does not show tools",
    ),
    "deepseek-ai-DeepSeek-V3.1": Facts(
        DEEPSEEK,
        header="<｜Assistant｜><think></think>",
        thinking=("enable_thinking", True, False),
        on="<｜Assistant｜><think>",
        tools="does not show tools",
    ),
    "deepseek-ai-DeepSeek-V3.2": Facts(
        DEEPSEEK,
        header="<｜Assistant｜><think></think>",
        thinking=("enable_thinking", True, False),
        on="<｜Assistant｜><think>",
    ),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Facts(
        DEEPSEEK,
        header="<｜Assistant｜></think>",
        thinking=("enable_thinking", True, False),
        on="<｜Assistant｜><think>",
    ),
    "deepseek-ai-DeepSeek-V4": Facts(
        DEEPSEEK,
        header="<｜Assistant｜></think>",
        thinking=("enable_thinking", True, False),
        on="<｜Assistant｜><think>",
    ),
    "fireworks-ai-llama-3-firefunction-v2": Facts(LLAMA, alone="'functions' is undefined"),
    "google-gemma-2-2b-it": Facts(
        ("<end_of_turn>",),
        header="<end_of_turn>\n<start_of_turn>model\n",
        system="System role not supported",
        tools="does not show tools",
    ),
    "google-gemma-4-31B-it-interleaved": Facts(
        ("<turn|>", "<|tool_response>"),
        header="<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        thinking=("enable_thinking", True, False),
        on="<turn|>\n<|turn>model\n",
    ),
    "google-gemma-4-31B-it": Facts(
        ("<turn|>", "<|tool_response>"),
        header="<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        thinking=("enable_thinking", True, False),
        on="<turn|>\n<|turn>model\n",
    ),
    "ibm-granite-granite-3.3-2B-Instruct": Facts(
        ("<|end_of_text|>",),
        header="<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        thinking=("thinking", True, False),
    ),
    "ibm-granite-granite-4.0": Facts(
        ("<|end_of_text|>",), header="<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
    ),
    "ibm-granite-granite-4.1": Facts(
        ("<|end_of_text|>",), header="<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
    ),
    "inclusionai-ling-3.0-flash": Facts(
        ("<|role_end|>",),
        header="<|role_end|><role>ASSISTANT</role>\n<think>",
        thinking=("enable_thinking", True, False),
        off="<|role_end|><role>ASSISTANT</role>\n<think></think>",
    ),
    "llama-cpp-deepseek-r1": Facts(
        DEEPSEEK,
        header="<｜end▁of▁sentence｜><｜Assistant｜><think>\n",
        tools="Object of type generator is not JSON serializable",
    ),
    "llama-cpp-rwkv-world": Facts(
        ("\n\n",),
        header="\n\nAssistant:",
        thinking=("enable_thinking", True, False),
        on="\n\nAssistant: <think>",
        off="\n\nAssistant: <think>\n</think>",
        tools="does not show tools",
    ),
    "meetkai-functionary-medium-v3.1": Facts(
        LLAMA, header="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "meetkai-functionary-medium-v3.2": Facts(
        LLAMA, header="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n>>>"
    ),
    "meta-llama-Llama-3.1-8B-Instruct": Facts(
        LLAMA, header="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "meta-llama-Llama-3.2-3B-Instruct": Facts(
        LLAMA, header="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "meta-llama-Llama-3.3-70B-Instruct": Facts(
        LLAMA, header="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "microsoft-Phi-3.5-mini-instruct": Facts(
        ("<|end|>",), header="<|end|>\n<|assistant|>\n", tools="does not show tools"
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": Facts(("</s>",), header="[/INST]"),
    "mistralai-Mistral-Nemo-Instruct-2407": Facts(("</s>",), header="[/INST]"),
    "moonshotai-Kimi-K2": Facts(IM, header="<|im_end|><|im_assistant|>assistant<|im_middle|>"),
    "muse-glimmer": Facts(
        ("<|eot|>",), header="<|eot|><|start|>assistant", thinking=("reasoning_strength", "high", "low")
    ),
    "openai-gpt-oss-120b": Facts(
        ("<|return|>", "<|call|>"),
        header="<|end|><|start|>assistant",
        ends="",
        thinking=("reasoning_effort", "high", "low"),
    ),
    "openbmb-MiniCPM5-1B": Facts(
        IM,
        header="<|im_end|>\n<|im_start|>assistant\n",
        thinking=("enable_thinking", True, False),
        on="<|im_end|>\n<|im_start|>assistant\n<think>\n",
        off="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "poolside-Laguna-S-2.1": Facts(
        ("</assistant>",),
        header="</user>\n<assistant><think>",
        thinking=("enable_thinking", True, False),
        off="</user>\n<assistant></think>",
    ),
    "poolside-Laguna-XS-2.1": Facts(
        ("</assistant>",),
        header="\n</user>\n<assistant>\n</think>",
        ends="\n</assistant>",
        thinking=("enable_thinking", True, False),
        on="\n</user>\n<assistant>\n<think>",
    ),
    "poolside-Laguna-XS.2": Facts(
        ("</assistant>",),
        header="\n</user>\n<assistant>\n</think>",
        ends="\n</assistant>",
        thinking=("enable_thinking", True, False),
        on="\n</user>\n<assistant>\n<think>",
    ),
    "tencent-Hy3": Facts(
        ("<｜hy_eos:opensource｜>",),
        header="<｜hy_Assistant:opensource｜><think:opensource></think:opensource>",
        thinking=("reasoning_effort", "high", "no_think"),
        on="<｜hy_Assistant:opensource｜><think:opensource>",
    ),
    "unsloth-Apriel-1.5": Facts(("<|end|>",), header="\n<|end|>\n<|assistant|>\n", ends="\n<|end|>"),
    "unsloth-mistral-Devstral-Small-2507": Facts(("</s>",), header="[/INST]"),
    "upstage-Solar-Open-100B": Facts(
        ("<|end|>", "<|calls|>"),
        header="<|end|><|begin|>assistant",
        thinking=("reasoning_effort", "high", "low"),
        off="<|end|><|begin|>assistant<|think|><|end|><|begin|>assistant",
    ),
}
