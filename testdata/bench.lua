-- For wrk: each request comes from a client address of its own and in the name of the
-- next user, so that the limits are on, but not met.
-- wrk ... -s testdata/bench.lua URL -- FILE; in FILE one Cookie header a line.

local cookies, n = {}, 0

function init(args)
	for line in io.lines(args[1]) do cookies[#cookies + 1] = line end
end

function request()
	n = n + 1
	wrk.headers["X-Forwarded-For"] = string.format("10.%d.%d.%d",
		math.floor(n / 65536) % 256, math.floor(n / 256) % 256, n % 256)
	wrk.headers["Cookie"] = cookies[n % #cookies + 1]
	return wrk.format()
end

-- Times are in microseconds.
function done(summary, latency)
	local errors = summary.errors
	print(string.format("\nresult %d %d %d %d %d", summary.requests, summary.duration,
		latency:percentile(50), latency:percentile(99),
		errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
