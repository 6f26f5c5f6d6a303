// The official JavaScript client.
import assert from "node:assert/strict";
import { test } from "node:test";
import { call, load, real, replies, scripted } from "./servers.mjs";

const OpenAI = load("openai").default;
const { zodFunction, zodResponseFormat, zodTextFormat } = load("openai/helpers/zod");
const { z } = load("zod");

const USER = [{ role: "user", content: "What is the capital of France?" }];
const ANSWER = "The capital of France is Paris.";
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.int().min(1).max(9) });
const realClient = new OpenAI({ baseURL: `${real.url}/v1`, apiKey: "none", maxRetries: 0 });
const client = new OpenAI({ baseURL: `${scripted.url}/v1`, apiKey: scripted.key, maxRetries: 0 });

test("whole and streamed answers and their usage agree", async () => {
  const ask = { model: real.model, messages: USER, temperature: 0 };
  const whole = await realClient.chat.completions.create(ask);
  const final = await realClient.chat.completions.stream({ ...ask, stream_options: { include_usage: true } }).finalChatCompletion();
  assert.equal(whole.choices[0].message.content, ANSWER);
  assert.equal(final.choices[0].message.content, ANSWER);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(whole._request_id);
});

test("structured output is parsed", async () => {
  const got = await realClient.chat.completions.parse({
    model: real.model,
    messages: USER,
    response_format: zodResponseFormat(Weather, "weather"),
  });
  Weather.parse(got.choices[0].message.parsed);
});

test("a forced tool call of a real model has valid arguments", async () => {
  const got = await realClient.chat.completions.parse({
    model: real.model,
    messages: USER,
    tools: [zodFunction({ name: "weather", parameters: Weather })],
    tool_choice: { type: "function", function: { name: "weather" } },
  });
  Weather.parse(got.choices[0].message.tool_calls[0].function.parsed_arguments);
});

for (const stream of [false, true]) {
  test(`its own tool loop runs a function${stream ? " [streamed]" : ""}`, async () => {
    const asked = [];
    const weather = ({ city }) => (asked.push(city), "sunny, 21 degrees");
    await replies("Let me see." + call("weather", { city: "Paris", days: 2 }));
    const runner = client.chat.completions.runTools({
      model: scripted.model,
      messages: USER,
      stream,
      tools: [zodFunction({ name: "weather", parameters: Weather, function: weather })],
    });
    const content = await runner.finalContent(); // without replies left, a prompt is its own answer
    assert.deepEqual(asked, ["Paris"]);
    assert.match(content, /sunny, 21 degrees/);
  });
}

test("responses, whole and streamed, agree", async () => {
  const ask = { model: real.model, input: USER, temperature: 0 };
  const whole = await realClient.responses.create(ask);
  const final = await realClient.responses.stream(ask).finalResponse();
  assert.equal(whole.output_text, ANSWER);
  assert.equal(final.output_text, ANSWER);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test("responses are parsed", async () => {
  const got = await realClient.responses.parse({
    model: real.model,
    input: USER,
    text: { format: zodTextFormat(Weather, "weather") },
  });
  Weather.parse(got.output_parsed);
});

test("errors are exceptions of their kind with message, code and param", async () => {
  await assert.rejects(client.chat.completions.create({ model: "other", messages: USER }), (e) => {
    assert.ok(e instanceof OpenAI.NotFoundError);
    assert.equal(e.code, "model_not_found");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model: scripted.model, messages: USER, temperature: 3 }), (e) => {
    assert.ok(e instanceof OpenAI.BadRequestError);
    assert.deepEqual([e.code, e.param], ["decimal_above_max_value", "temperature"]);
    assert.match(e.message, /temperature/);
    return true;
  });
  const wrong = new OpenAI({ baseURL: `${scripted.url}/v1`, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(wrong.models.list(), OpenAI.AuthenticationError);
});

test("a stream that is left ends", async () => {
  await replies();
  const prompt = "héllo 世界 ".repeat(50);
  const stream = await client.completions.create({ model: scripted.model, prompt, max_tokens: 2000, stream: true });
  for await (const chunk of stream) {
    assert.ok(prompt.startsWith(chunk.choices[0].text));
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("models are listed", async () => {
  const ids = [];
  for await (const model of realClient.models.list()) ids.push(model.id);
  assert.deepEqual(ids, [real.model]);
});
