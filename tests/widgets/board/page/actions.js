import { aborting, nameGroups } from "/widgets/board/page/actions.js";
import { equal, test } from "./harness.js";

const groups = (...labels) => labels.map((label) => ({ label }));

test("a question names its groups, and no more than three of many", () => {
  equal(nameGroups(groups("tp"), true), "group 'tp'");
  equal(nameGroups(groups("tp", "dp"), true), "2 hung groups, 'tp' and 'dp',");
  equal(nameGroups(groups("a", "b", "c", "d"), false), "4 groups, 'a', 'b', 'c' and 'd',");
  equal(nameGroups(groups("a", "b", "c", "d", "e"), false), "5 groups, 'a', 'b', 'c' and 2 more,");
});

test("an abort that takes long tells how many ranks it has reached", () => {
  const two = [{ ranks: [0, 1, 2], flight: 2 }, { ranks: [2, 3], flight: 0 }];
  equal(aborting(two, 500), "Aborting…");
  equal(aborting(two, 1_500), "Aborting… 2 of 4 ranks");
  // A rank may have ops in flight in several groups.
  equal(aborting(two.map((one) => ({ ...one, flight: 3 })), 1_500), "Aborting… 0 of 4 ranks");
  equal(aborting(two.map((one) => ({ ...one, flight: 0 })), 1_500), "Aborting… 4 of 4 ranks");
});
