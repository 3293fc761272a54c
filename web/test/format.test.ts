import { describe, expect, test } from "vitest";
import { bytes, duration, percent, plain, si } from "../src/model/format";

describe("numbers in pictures", () => {
  test("have three significant digits and the prefix that fits", () => {
    expect([3.2e9, 999.4, 999.6, 0, 12, 1.5e13].map((one) => si(one))).toEqual([
      "3.2 G",
      "999",
      "1 K",
      "0",
      "12",
      "15 T",
    ]);
    expect([0.07667, 2, 1e-9, 0].map(duration)).toEqual(["76.7 ms", "2 s", "1 ns", "0 s"]);
    expect(bytes(2_000_000)).toBe("2 MB");
    expect([0.4124, 0.0475, 0.0005, 1, 0].map(percent)).toEqual(["41.2%", "4.75%", "0.05%", "100%", "0%"]);
    expect(plain(1234567)).toBe("1,234,567");
  });
  test("say n/a of what is not known", () => {
    expect([si(null), duration(undefined), percent(Number.NaN), plain(null)]).toEqual(["n/a", "n/a", "n/a", "n/a"]);
  });
});
