"""How prompts and answers may be treated: the words of the command line, and of every record."""

PROMPT_MODES = {
    "chat_single_user": "all of it, examples included, as one user turn",
    "chat_multiturn": "the turns of the task's messages",
    "raw": "as it is, without a template or a start token",
    "raw_bos": "as it is, after the start token",
}
POST = {
    "eos_then_stop": "cut at the first end of text, then at the first stop string",
    "stop_then_special": "cut at the first stop string, then special tokens dropped: text after an end of text survives",
}
