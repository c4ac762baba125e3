import { nameGroups } from "/widgets/board/page/actions.js";
import { equal, test } from "./harness.js";

const groups = (...labels) => labels.map((label) => ({ label }));

test("a question names its groups, and no more than three of many", () => {
  equal(nameGroups(groups("tp"), true), "group 'tp'");
  equal(nameGroups(groups("tp", "dp"), true), "2 hung groups, 'tp' and 'dp',");
  equal(nameGroups(groups("a", "b", "c", "d"), false), "4 groups, 'a', 'b', 'c' and 'd',");
  equal(nameGroups(groups("a", "b", "c", "d", "e"), false), "5 groups, 'a', 'b', 'c' and 2 more,");
});
