// What the tests of the page's modules use; test_page_modules.py collects and runs them.

const tests = new Map();

/** A test: its name stands in the line of the call, by which pytest finds it. */
export function test(name, body) {
  if (tests.has(name)) throw new Error(`two tests are called "${name}"`);
  tests.set(name, body);
}

/** Fail unless two values are the same, or are made of the same. */
export function equal(actual, expected) {
  const [found, wanted] = [actual, expected].map((value) => show(value));
  if (found !== wanted) throw new Error(`found ${found}\ninstead of ${wanted}`);
}

/** A value as text, whole. */
function show(value) {
  if (value instanceof Map) return `Map ${show([...value])}`;
  if (value instanceof Set) return `Set ${show([...value])}`;
  if (Array.isArray(value)) return `[${value.map(show).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const parts = Object.keys(value).sort().map((key) => `${key}: ${show(value[key])}`);
    return `{${parts.join(", ")}}`;
  }
  return typeof value === "string" ? JSON.stringify(value) : String(value);
}

/** Run the tests of a file; return name → null, or what went wrong. */
export async function run(file) {
  tests.clear();
  await import(file);
  const outcomes = {};
  for (const [name, body] of tests) {
    try {
      await body();
      outcomes[name] = null;
    } catch (error) {
      outcomes[name] = error.stack;
    }
  }
  return outcomes;
}
