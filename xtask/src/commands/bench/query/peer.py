import json, sys, time
import duckdb

data, tables, sources, views, rounds, question = sys.argv[1:7]
connection = duckdb.connect()
connection.execute("SET enable_progress_bar = false")
connection.execute("SET TimeZone = 'UTC'")
for table in tables.split(","):
    # The live files, as the table's log has them.
    log = f"{data}/{table}/_delta_log/00000000000000000000.json"
    lines = [json.loads(line) for line in open(log)]
    files = [f"{data}/{table}/{line['add']['path']}" for line in lines if "add" in line]
    if files:
        listed = ", ".join(f"'{file}'" for file in files)
        connection.execute(
            f"CREATE VIEW {table} AS SELECT * FROM read_parquet([{listed}], hive_partitioning = true)"
        )
for view in views.split(","):
    text = open(f"{sources}/{view}.sql").read()
    connection.execute(f"CREATE VIEW {view} AS {text}")
seconds = []
for _ in range(int(rounds)):
    begin = time.perf_counter()
    answer = connection.execute(question)
    names = [column[0] for column in answer.description]
    rows = answer.fetchall()
    seconds.append(time.perf_counter() - begin)
print(json.dumps({"seconds": seconds, "rows": [dict(zip(names, row)) for row in rows]}))
