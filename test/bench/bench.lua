-- For wrk: each request has the headers that a browser sends for a page of an allowed
-- origin. Each comes from a client address of its own and in the name of the next user, so
-- that the limits are on, but not met.
-- wrk ... -s bench.lua URL -- USERS METHOD CONTENT-TYPE BODY HEADER VALUE
-- USERS and BODY are files; in USERS one header a line, by which a server knows the user.

local users, n = {}, 0
local page = "https://app.staging.example.com"

function init(args)
	for line in io.lines(args[1]) do
		local name, value = line:match("^(.-): (.*)$")
		users[#users + 1] = {name = name, value = value}
	end
	local headers = wrk.headers
	headers["User-Agent"] = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 "
		.. "(KHTML, like Gecko) Chrome/141.0.0.0 Safari/537.36"
	headers["Accept"] = "application/json, text/plain, */*"
	headers["Accept-Language"] = "en-GB,en;q=0.9,de;q=0.8"
	headers["Accept-Encoding"] = "gzip, deflate, br, zstd"
	headers["Origin"] = page
	headers["Referer"] = page .. "/"
	headers["Sec-Fetch-Dest"] = "empty"
	headers["Sec-Fetch-Mode"] = "cors"
	headers["Sec-Fetch-Site"] = "same-site"
	wrk.method = args[2]
	if args[3] ~= "" then headers["Content-Type"] = args[3] end
	if args[4] ~= "" then wrk.body = io.open(args[4], "rb"):read("*a") end
	if args[5] ~= "" then headers[args[5]] = args[6] end
end

function request()
	n = n + 1
	wrk.headers["X-Forwarded-For"] = string.format("10.%d.%d.%d",
		math.floor(n / 65536) % 256, math.floor(n / 256) % 256, n % 256)
	local user = users[n % #users + 1]
	wrk.headers[user.name] = user.value
	return wrk.format()
end

-- Times are in microseconds.
function done(summary, latency)
	local errors = summary.errors
	print(string.format("\nresult %d %d %d %d %d", summary.requests, summary.duration,
		latency:percentile(50), latency:percentile(99),
		errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
