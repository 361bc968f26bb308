"""OpenAI's formats: reading requests (JSON, forms) and writing answers. Pure, except `forms.py`, which writes files."""
