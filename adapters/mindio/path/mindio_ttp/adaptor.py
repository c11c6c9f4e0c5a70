"""MindIO's old adaptor for Megatron-LM, which MindIO no longer has either."""

raise ImportError(
    "mindio_ttp.adaptor is of an old MindIO and patches Megatron-LM itself. With `midstep run --mindio` use a "
    "MindSpeed-LLM that has mindspeed_llm/core/high_availability, or `midstep.adapters.megatron`; see docs/mindio.md."
)
