// Before each script of ours: what it says, in the language of the kernel when it was sent. English texts are the keys.
const WORDS = {};

/** A text with its named placeholders filled in: say("step {step} of {last}", { step, last }). */
function say(text, values = {}) {
  return (WORDS[text] ?? text).replace(/\{(\w+)\}/g, (placeholder, name) => values[name] ?? placeholder);
}

