#!/bin/sh
# A local server (chatterm serve smollm2) from the shell: the answer as a stream, then JSON that fits a schema.
url=http://127.0.0.1:8642/v1/chat/completions
curl -sN "$url" -H 'Content-Type: application/json' -d '{
  "model": "smollm2", "stream": true, "messages": [{"role": "user", "content": "Name three rivers."}]}'
curl -s "$url" -H 'Content-Type: application/json' -d '{
  "model": "smollm2", "messages": [{"role": "user", "content": "Where is the Nile?"}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": {
    "type": "object", "properties": {"continent": {"type": "string"}}, "required": ["continent"]}}}}'
