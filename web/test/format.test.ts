import { expect, test } from "vitest";
import {
  bytes,
  counted,
  duration,
  figure,
  listed,
  percent,
  plain,
  runsOf,
  shortenedApart,
  si,
} from "../src/model/format";

test("counts and rates have decimal prefixes, as in the text report", () => {
  expect(si(3.2e9, "FLOP/s")).toBe("3.2 GFLOP/s");
  expect(si(999_999)).toBe("1 M");
  expect(si(999_994)).toBe("999.99 K");
  expect(si(0)).toBe("0");
  expect(si(0.000_123_4)).toBe("0.000123");
  expect(bytes(1_500_000)).toBe("1.5 MB");
});

test("seconds have the unit that keeps them above one", () => {
  expect(duration(0.07667)).toBe("76.67 ms");
  expect(duration(0.000_001_5)).toBe("1.5 µs");
  expect(duration(12)).toBe("12 s");
  expect(duration(0)).toBe("0 s");
});

test("what is not known says so", () => {
  for (const unknown of [null, undefined, Number.NaN, Number.POSITIVE_INFINITY])
    for (const show of [si, duration, percent, plain, bytes]) expect(show(unknown)).toBe("n/a");
});

test("shares, counts and lists read as people write them", () => {
  expect(percent(0.4125)).toBe("41.25%");
  expect(percent(0.4125, 0)).toBe("41%");
  expect(plain(1_234_567)).toBe("1,234,567");
  expect(plain(1234.567)).toBe("1,234.57");
  expect(listed(["a"])).toBe("a");
  expect(listed(["a", "b", "c"])).toBe("a, b and c");
  expect(counted(1, "batch")).toBe("1 batch");
  expect(counted(2, "batch")).toBe("2 batches");
  expect(runsOf([3, 4, 5, 9])).toBe("3–5, 9");
});

test("a figure of a comparison keeps six digits, and a count all of them", () => {
  expect(figure(0.177592123)).toBe("0.177592");
  expect(figure(777_570_484_224)).toBe("777,570,484,224");
  expect(figure(4545.4545)).toBe("4,545.45");
  expect(figure(null)).toBe("n/a");
});

test("names that are cut stay different", () => {
  expect(shortenedApart(["void kernel<float>(float const*, int, (anonymous)::T)"], 21).values().next().value).toBe(
    "kernel<float>",
  );
  const short = shortenedApart(
    ["gemm", "void kernel_that_is_long_and_adds<float>", "void kernel_that_is_long_and_adds<half>"],
    21,
  );
  expect([...short.values()]).toEqual(["gemm", "void kerne…dds<float>", "void kerne…adds<half>"]);
  const [add, mul] = [
    "at::elementwise_kernel<4, AddFunctor<float>, Array<char*, 3> >",
    "at::elementwise_kernel<4, MulFunctor<float>, Array<char*, 3> >",
  ];
  const apart = shortenedApart([add, mul], 30);
  expect([apart.get(add), apart.get(mul)]).toEqual([
    "at::elemen…, AddFunctor<float…",
    "at::elemen…, MulFunctor<float…",
  ]);
});
