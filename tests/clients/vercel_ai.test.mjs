// Vercel's AI SDK with its provider for compatible servers, and with those of OpenAI (by responses) and Anthropic.
import assert from "node:assert/strict";
import { test } from "node:test";
import { call, load, real, replies, scripted } from "./servers.mjs";

const { generateText, isStepCount, Output, streamText, tool, APICallError } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const { createOpenAI } = load("@ai-sdk/openai");
const { createAnthropic } = load("@ai-sdk/anthropic");
const { z } = load("zod");

const prompt = "What is the capital of France?";
const ANSWER = "The capital of France is Paris.";
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.int().min(1).max(9) });
const compatible = (url, apiKey) =>
  createOpenAICompatible({ name: "minisgl", baseURL: `${url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const providerOptions = { openai: { store: false, forceReasoning: true } }; // the server keeps no responses
const providers = {
  "chat completions": compatible,
  responses: (url, apiKey) => createOpenAI({ baseURL: `${url}/v1`, apiKey }),
  messages: (url, apiKey) => createAnthropic({ baseURL: `${url}/v1`, apiKey }),
};

for (const [api, provider] of Object.entries(providers)) {
const realModel = provider(real.url, "none")(real.model);
const model = provider(scripted.url, scripted.key)(scripted.model);

test(`whole and streamed answers and their usage agree [${api}]`, async () => {
  const ask = { model: realModel, prompt, temperature: 0, maxRetries: 0 };
  const whole = await generateText(ask);
  const stream = streamText(ask);
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(whole.text, ANSWER);
  assert.equal(text, ANSWER);
  assert.ok(whole.usage.outputTokens > 0);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  assert.equal(await stream.finishReason, whole.finishReason);
});

test(`structured output is parsed [${api}]`, async () => {
  const got = await generateText({ model: realModel, prompt, output: Output.object({ schema: Weather }), maxRetries: 0 });
  Weather.parse(got.output);
});

for (const streamed of [false, true]) {
  test(`tools are run in several steps beside reasoning${streamed ? " [streamed]" : ""} [${api}]`, async () => {
    const asked = [];
    const weather = tool({
      description: "The weather of a city.",
      inputSchema: Weather,
      execute: async ({ city }) => (asked.push(city), `sunny in ${city}`),
    });
    await replies(
      "<think>\nWhy not?\n</think>\n\nLet me see." + call("weather", { city: "Paris", days: 2 }) + call("weather", { city: "Rome", days: 1 }),
    );
    const ask = { model, prompt, tools: { weather }, stopWhen: isStepCount(3), maxRetries: 0, providerOptions };
    const got = streamed ? streamText(ask) : await generateText(ask);
    if (streamed) await got.consumeStream();
    const text = await got.text; // without replies left, a prompt is its own answer
    assert.deepEqual(asked, ["Paris", "Rome"]);
    assert.match(text, /tool: sunny in Paris\ntool: sunny in Rome/);
    if (api !== "responses") assert.equal((await got.steps)[0].reasoningText, "Why not?"); // there it reads summaries alone
    assert.match(text, /assistant: thinks Why not\? Let me see\./);
    assert.deepEqual((await got.steps).map((s) => s.finishReason), ["tool-calls", "stop"]);
  });
}

test(`errors show what the server said [${api}]`, async () => {
  const other = provider(scripted.url, scripted.key)("other");
  await assert.rejects(generateText({ model: other, prompt, maxRetries: 0 }), (e) => {
    assert.ok(APICallError.isInstance(e));
    assert.equal(e.statusCode, 404);
    assert.match(e.message, /'other'/);
    return true;
  });
});
}
