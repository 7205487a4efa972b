"""Around an engine: text, names, a history, OpenAI's wire format, and what operators and the page
see."""
