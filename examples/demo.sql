-- Demo data, into empty tables only: ./dev.sh run and ./dev.sh tour add it.

insert into users (email, permission)
select * from (values ('member@hubs.example', 'member'), ('admin@hubs.example', 'admin')) as demo
where not exists (select from users);

insert into hubs (name, description, status, created_at, updated_at)
select quarter || ' ' || place,
       purpose || ' in the ' || lower(quarter) || ' quarter, number ' || n || '.',
       case when n % 7 = 0 then 'archived' else 'active' end,
       now() - n * interval '29 hours', now() - n * interval '5 hours'
from (select *, row_number() over (order by place, quarter) as n
      from unnest(array['North', 'South', 'East', 'West', 'Old']) as quarter,
           (values ('Harbour', 'Ships and ferries'), ('Station', 'Trains and trams'),
                   ('Market', 'Fruit, bread and fish'), ('Library', 'Books, maps and quiet rooms'),
                   ('Workshop', 'Tools to borrow, benches to rent'), ('Depot', 'Parcels, stored and sorted'),
                   ('Garden', 'Beds, sheds and a well'), ('Mill', 'Flour on weekdays'),
                   ('Observatory', 'Two telescopes, open on clear nights'), ('Café', 'Coffee, 8 to 18 o''clock')
           ) as places (place, purpose)) as demo
where not exists (select from hubs);
