import { isPlace, withPlaces } from "/widgets/board/page/links.js";
import { equal, test } from "./harness.js";

test("a place in a text is a button", () => {
  const pressed = [];
  const nodes = withPlaces("in it (cell 7 line 5): not <b>", (line) => pressed.push(line));
  equal(nodes.map((node) => node.textContent ?? node), ["in it ", "(cell 7 line 5):", " not <b>"]);
  nodes[1].querySelector("button").click();
  equal(pressed, ["cell 7 line 5"]);
  equal(withPlaces("train.py:88", () => {}), ["train.py:88"]);
});

test("no line of text ends within the name of ranks", () => {
  const nodes = withPlaces("Ranks 0–1, 8–11 wait for rank 12.", () => {});
  equal(nodes.map((node) => node.textContent ?? node), [
    "Ranks ", "0–1", ", ", "8–11", " wait for ", "rank 12", ".",
  ]);
  equal(nodes.filter((node) => node.className === "whole").length, 3);
});

test("a line of a file is no place of the notebook", () => {
  equal(["cell 7 line 5", "train.py:88", "", "in cell 7 line 5", "cell 7 (earlier) line 5"].map(isPlace), [
    true, false, false, false, false,
  ]);
});
