"""The list of all forms of calls, and the choice by a model's template."""

from modelwright.serve.agents.calls import CallForm, JsonForm
from modelwright.serve.agents.pythonic import PythonicForm

OWN_FORM = JsonForm("own")
"""For templates without a place for tools: they are listed in the system message, and a call is a JSON object."""
PLAIN_JSON = JsonForm("json")

FORMS: dict[str, CallForm] = {
    form.name: form
    for form in (
        JsonForm("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", before="\n"),
        JsonForm("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "]", separator=", ", before="[", id_length=9),
        PythonicForm(),
        JsonForm("llama3_json", ("<|python_tag|>", '"parameters": '), field="parameters"),
        PLAIN_JSON,
        OWN_FORM,
    )
}
"""Forms by name. The first whose marks a template has is chosen; `json` and `own` have none."""


def choose_form(name: str, template: str, *, takes_tools: bool) -> CallForm:
    """Returns the form of a name; for `auto` that of the template, `json` for an unknown one with a place for tools."""
    if not takes_tools:
        return OWN_FORM
    if name != "auto":
        return FORMS[name]
    return next((one for one in FORMS.values() if any(mark in template for mark in one.marks)), PLAIN_JSON)
